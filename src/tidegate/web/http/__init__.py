"""What every front door needs: the outer checks, keys, request bodies, responses and refusals."""
