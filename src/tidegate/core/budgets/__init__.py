"""Budgets: the counts against limits, and the dealing and settling of grants."""
