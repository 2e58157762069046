"""The road to a model server: choose a deployment, call it, and sort what comes back."""
