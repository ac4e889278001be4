"""A job, its plan, its checkpoints, its results."""
