"""The front doors. Each turns HTTP into the engine's verbs and the engine's nouns into the shapes its clients know."""
