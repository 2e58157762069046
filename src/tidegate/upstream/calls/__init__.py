"""Calls, background and interactive: choose a deployment, send, and settle what a call took."""
