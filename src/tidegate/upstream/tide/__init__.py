"""The tide at work: collect signals, and bound the background calls of each deployment."""
