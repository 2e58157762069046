"""Verbs about what tenants have: keys, files and uploads, budgets, usage, webhooks."""
