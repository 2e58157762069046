"""What holds the SQL text, the schema, the state tables and the two drivers together."""
