"""Backends: blobs, shared limits and the system.

They do not know each other. Only `storage.py` and `service.py` name one.
"""
