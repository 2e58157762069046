"""Background responses: calls that are run as jobs of one item, and read later."""
