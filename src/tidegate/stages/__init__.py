"""The stages of a job: accept, ingest, lease, perform, record, ship; and tend. They meet only in the store."""
