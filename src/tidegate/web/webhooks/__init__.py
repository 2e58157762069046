"""Webhook endpoints as OpenAI's SDK manages them."""
