"""What callers may not say in a request body: fields by engine, provider object ids, media hosts."""
