"""The commands: parse, call, print. What a command does is done elsewhere."""

from tidegate.cli.terminal.loading import collect_seldom

collect_seldom()

from tidegate.cli.app import main  # noqa: E402

__all__ = ["main"]
