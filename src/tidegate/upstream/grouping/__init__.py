"""Items that share one call: collect them, send them, and give each its answer."""
