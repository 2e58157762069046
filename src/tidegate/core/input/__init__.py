"""Inputs: the rules for a line, one pass over the lines, their order, and the slices."""
