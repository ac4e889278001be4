"""What processes share: logging, signals, planner and replica processes."""
