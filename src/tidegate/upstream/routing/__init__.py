"""Routes and deployments: names, slots, breaker, retry budget, rests, probes."""
