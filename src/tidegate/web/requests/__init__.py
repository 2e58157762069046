"""Checks what callers ask for: query parameters, headers and bodies become values that can be trusted."""
