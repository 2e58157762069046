"""Upkeep: one duty in each file. Each pass is bounded and may run in all processes at once."""
