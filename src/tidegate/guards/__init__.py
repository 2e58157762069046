"""What judges requests and answers, for the stages and for web: guardrails and the operator's own code."""
