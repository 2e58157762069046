"""Under the verbs: two drivers, one SQL text, the schema and its steps, the clock, rows and tables."""
