"""Things to test against: a simulated model server, and a seeded simulation of the whole engine.

Nothing in here is on the road of a real job, and nothing on that road imports it.
"""
