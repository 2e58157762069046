"""Verbs about jobs: create, list, pause, change and retry them; and about flows."""
