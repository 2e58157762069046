"""Budgets: what is counted against a limit, and how grants are dealt and settled."""
