"""The completion-batch API over our jobs."""
