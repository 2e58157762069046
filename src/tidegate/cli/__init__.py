"""The command line: parse, call, print. What a command does is done elsewhere; here are its words."""

from tidegate.cli.app import main

__all__ = ["main"]
