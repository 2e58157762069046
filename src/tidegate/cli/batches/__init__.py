"""Commands about batches and files at a server: create, look, follow, change, read results."""
