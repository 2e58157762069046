"""ingest: an accepted input becomes a work file and slices."""
