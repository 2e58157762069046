"""Interactive calls, passed on to the model servers as they come."""
