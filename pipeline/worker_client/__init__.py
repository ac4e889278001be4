"""A worker's side of the pipeline: the protocol of its loop, and the client that takes and commits shards."""
