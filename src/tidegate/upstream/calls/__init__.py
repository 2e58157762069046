"""Calls, background and interactive: choose a deployment, send, and settle the usage."""
