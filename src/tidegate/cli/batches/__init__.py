"""Commands about batches and files at a server: create, show, follow, change, read results."""
