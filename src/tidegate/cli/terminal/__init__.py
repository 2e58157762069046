"""What every command stands on: options, words on the terminal, progress, result files, and the running server."""
