"""Things to test against: a simulated model server, and a processor of queued calls.

Nothing in here is on the road of a real job, and nothing on that road imports it.
"""
