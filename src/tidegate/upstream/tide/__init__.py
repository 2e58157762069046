"""The tide at work: signals in, a limit on background calls out."""
