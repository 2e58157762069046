"""What happens to a job, as server-sent events."""
