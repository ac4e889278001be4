"""Results: parts, and the checkpoints that they are built from."""
