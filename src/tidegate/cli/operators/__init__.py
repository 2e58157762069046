"""Commands of operators, who run a server for others: keys, deployments, models,
limits, usage, audit."""
