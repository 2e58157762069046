"""The parts that commands share: options, words on the terminal, progress, result
files, and the running server."""
