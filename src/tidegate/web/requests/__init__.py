"""Checks of requests: query parameters, headers and bodies become values that can be trusted."""
