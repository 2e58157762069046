"""Where calls may go: routes, deployments and how each of them stands."""
