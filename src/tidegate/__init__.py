"""Tidegate: batch inference through the idle capacity of model servers."""

__version__ = "0.1.0"
