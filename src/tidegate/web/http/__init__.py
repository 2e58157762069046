"""What every door stands on: the wall, keys, bodies in and out, and answers."""
