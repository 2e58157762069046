"""Inputs: what a line must be, one pass over the lines, their order, and the slices."""
