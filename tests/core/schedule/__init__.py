"""The scheduler: every layer held against its bound, in made-up looks and in a fluid world."""
