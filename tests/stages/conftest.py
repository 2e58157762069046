"""Stages are tried in the world of the worker's tests, too."""

from tests.worker.conftest import live, world

__all__ = ["live", "world"]
