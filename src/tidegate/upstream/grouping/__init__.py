"""Items that share one call: collect, send, and hand out the answers."""
