"""One process for each engine of the stage `peers`; what they share is `benchmarks.peers.offline`."""
