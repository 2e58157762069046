"""Answers of model servers: read, judged, and written as result lines or events."""
