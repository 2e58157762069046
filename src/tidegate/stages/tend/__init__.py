"""Upkeep: one duty per file, each bounded per pass and safe to run in every process at once."""
