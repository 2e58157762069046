"""The events of a job, as server-sent events."""
