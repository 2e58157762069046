"""Verbs about jobs: create, list, pause, change, retry, and the flows that they wait in."""
