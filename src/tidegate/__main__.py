"""Runs the command line, so that `python -m tidegate` equals `tidegate`."""

from tidegate.cli import main

main()
