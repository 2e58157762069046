"""Stand-ins for tests: a simulated model server, and a processor of queued calls.

A real job uses none of this code, and the code for real jobs does not import it.
"""
