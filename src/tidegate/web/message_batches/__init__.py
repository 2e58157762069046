"""Anthropic's Message Batches API over our jobs."""
