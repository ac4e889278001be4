"""Tasks: what calls ask about each row, and the columns that the results become. A file for each kind of request."""
