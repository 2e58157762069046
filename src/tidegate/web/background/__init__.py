"""Background responses: calls that run as jobs of one item and are read later."""
