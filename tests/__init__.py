"""The tests of Tidegate; `tests.support` holds the real servers, processes and faults that they stand on."""
