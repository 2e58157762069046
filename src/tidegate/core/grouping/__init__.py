"""Several items as one call, and its answer taken apart again."""
