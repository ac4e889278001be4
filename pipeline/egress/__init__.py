"""Events that leave: results, job changes and releases, published to topics at least once."""
