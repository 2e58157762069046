"""Items that share one call."""
