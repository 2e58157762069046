"""The commands: each parses its arguments, calls the engine and prints. The work itself
is done elsewhere."""

from tidegate.cli.terminal.loading import collect_seldom

collect_seldom()

from tidegate.cli.app import main  # noqa: E402

__all__ = ["main"]
