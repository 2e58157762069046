"""What tokens are used, and what they cost."""
