"""What lies between a step and the device that computes it: transfers, graphs, memory."""
