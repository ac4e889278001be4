"""Tables: the kinds that callers have, and the files that they are read from and written to."""
