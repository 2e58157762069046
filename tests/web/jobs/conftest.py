"""Forecasts are tried over jobs as a worker's store has them."""

from tests.worker.conftest import world

__all__ = ["world"]
