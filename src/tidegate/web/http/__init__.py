"""The common parts of all doors: outer checks, keys, request bodies, responses and refusals."""
