"""Webhook endpoints, managed as in OpenAI's API."""
