"""The tide of each deployment: it collects signals and bounds the deployment's background calls."""
