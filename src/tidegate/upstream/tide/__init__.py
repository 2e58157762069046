"""The tide of each deployment: collect signals, and bound the background calls of each deployment."""
