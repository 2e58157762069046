"""Judges of requests and answers, for items and interactive calls: guardrails and the operator's own code."""
