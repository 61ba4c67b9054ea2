"""Pure decisions of the cache manager: no I/O, no clock, no randomness."""
