"""Calls through a queue in Redis, from which llm-d's processor takes them."""
