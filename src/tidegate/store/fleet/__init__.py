"""Verbs about what processes share: the living ones, their reports, deployments and the mode."""
