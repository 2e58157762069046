"""The layer under the verbs: two drivers, one SQL text, the schema, the clock, rows and tables."""
