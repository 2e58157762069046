"""What Tidegate remembers: one SQL text, one Store, two drivers (SQLite and PostgreSQL)."""
