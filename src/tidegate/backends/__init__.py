"""Backends: blobs, shared limits and the system. They do not know each other; only `service.py`
names one."""
