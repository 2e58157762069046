"""Budgets: what is counted against a limit, and how a grant is dealt."""
