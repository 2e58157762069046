"""What only an operator does."""
