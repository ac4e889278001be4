"""The parts of the sampler: counter-based randomness, penalties, filters and draws, log-probabilities."""
