"""Calls, background and interactive: choosing a deployment, sending, and settling what a call took."""
