"""`tidegate run`: turns a file or a table into results, without a server."""
