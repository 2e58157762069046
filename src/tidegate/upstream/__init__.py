"""Everything between the engine and a model server: choosing a deployment, calling it, and sorting what comes back."""
