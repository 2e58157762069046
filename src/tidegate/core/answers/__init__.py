"""What a model server said: read, judged, and written as result lines or events."""
