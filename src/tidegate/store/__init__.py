"""The store: `schema.sql`, `queries/` and one Store over two drivers, SQLite and PostgreSQL."""
