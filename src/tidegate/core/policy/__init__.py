"""What may be sent and what may be handed on: rules of keys, guardrails, hooks."""
