"""Rules of what may be sent and handed on: keys, guardrails, patterns, schemas."""
