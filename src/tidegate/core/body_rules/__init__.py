"""Rules of request bodies: fields that callers may not set, ids of provider objects, media
hosts."""
