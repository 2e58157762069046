"""Ingest: turn an accepted input into a work file and slices."""
