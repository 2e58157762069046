"""Verbs about the possessions of tenants: keys, files and uploads, budgets, usage, webhooks."""
