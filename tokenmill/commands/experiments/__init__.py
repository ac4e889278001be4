"""`tokenmill experiment`."""
