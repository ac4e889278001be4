"""Results: parts, and the checkpoints from which they are built."""
