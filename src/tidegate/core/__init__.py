"""Nouns and rules of the engine. Pure: nothing here does I/O, reads a clock or draws a random number."""
