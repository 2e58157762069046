"""Several items as one call: join their bodies, and split the answer."""
