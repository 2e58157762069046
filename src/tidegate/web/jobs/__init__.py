"""Creating, reading and watching jobs, for every front door."""
