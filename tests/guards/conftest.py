"""Rules are tried on whole workers, in the world of their tests."""

from tests.worker.conftest import live, world

__all__ = ["live", "world"]
