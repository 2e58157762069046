"""Anthropic's Message Batches API, made of jobs."""
