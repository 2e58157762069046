"""Commands about the server itself: set up, check, start, migrate, back up; and the simulated model
server.
"""
