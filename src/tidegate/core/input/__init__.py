"""Reading an input: what a line must be, one pass over it, its order and its slices."""
