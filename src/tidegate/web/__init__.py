"""The front doors: HTTP requests become verbs of the engine, and its nouns become the shapes that
clients know.
"""
