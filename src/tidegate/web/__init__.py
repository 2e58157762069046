"""The front doors: HTTP into verbs of the engine, and its nouns into the shapes that clients know."""
