"""`tokenmill run`: a whole job in one process, on one folder."""
