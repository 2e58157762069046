"""Verbs about what all processes share: who is alive, what each reports, deployments, the mode."""
