"""Rules of what may be sent and passed on: keys, guardrails, patterns, schemas."""
