"""The tide: how much of a deployment batch work may use right now."""
