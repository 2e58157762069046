"""The worker: small services of one process (heartbeat, leasing, runners, record, ingest, ship,
upkeep), and what it leased.
"""
