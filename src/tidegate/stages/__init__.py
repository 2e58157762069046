"""The stages of a job: accept, ingest, lease, perform, record, ship; and tend.

They share only the store.
"""
