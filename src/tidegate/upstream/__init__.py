"""The road to a model server: choose a deployment, call it, and sort its answers and errors."""
