"""Interactive calls, passed on as they come."""
