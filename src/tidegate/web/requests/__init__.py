"""What callers ask for, checked: query parameters, headers and bodies become values that can be trusted."""
