"""Upkeep: one duty a file, each bounded a pass and safe in every process at once."""
