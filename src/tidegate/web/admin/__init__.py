"""The admin API: what only an operator may do."""
