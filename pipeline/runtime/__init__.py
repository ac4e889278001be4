"""What long-running parts share: supervision, leader election, executors, unavailable services."""
