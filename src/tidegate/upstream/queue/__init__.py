"""Sending through a queue that another processor takes from."""
