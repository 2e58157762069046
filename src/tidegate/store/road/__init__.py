"""Verbs of the road: ingest, leases and snapshots, outcomes, and the charges of a flush."""
