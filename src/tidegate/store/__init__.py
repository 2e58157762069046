"""The store: `schema.sql`, `queries/`, and one Store over drivers for SQLite and PostgreSQL."""
