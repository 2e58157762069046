"""`tidegate run`: a file or a table in, results out, without a server."""
