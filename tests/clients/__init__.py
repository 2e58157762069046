"""Clients that other people wrote, unpatched, against `tidegate serve`: `make clients`."""
