"""The completion-batch API, made of jobs."""
