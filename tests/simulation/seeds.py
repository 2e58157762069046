"""Which seeds the tests run: the fixed ones of every test run, and how many of a family are tried before a planted bug counts as missed."""

FIXED_COUNT = 40
CHUNK = 10

# Each planted bug shows in a third of its family's seeds or more.
FAMILY_COUNT = 24
