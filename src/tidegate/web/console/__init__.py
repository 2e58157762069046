"""The console: pages for operators, rendered by the server."""
