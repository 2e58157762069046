"""The tide: how much of a deployment background work may use right now, decided from signals."""
