"""The worker: the loops of one process that keep the road moving, and what they hold."""
