"""The road: accept, ingest, lease, perform, record, ship; and tend. Stages never import each other: they meet in the store."""
