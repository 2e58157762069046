"""Commands of those who run a server for others: keys, deployments, models, limits, usage, audit."""
