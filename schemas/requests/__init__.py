"""An input line: request bodies, limits, and the errors of rows."""
