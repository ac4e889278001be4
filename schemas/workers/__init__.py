"""What workers send and receive: heartbeats, queue messages, the lane, metrics."""
