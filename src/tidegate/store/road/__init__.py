"""Verbs of the road: ingest, leases and snapshots, outcomes, and what a flush costs whom."""
