"""Nouns and rules of the engine. Pure: no I/O, no clock, no randomness."""
