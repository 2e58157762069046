"""Checks of requests and answers of items and interactive calls: guardrails and operators' code."""
