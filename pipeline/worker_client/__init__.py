"""A worker's side of the pipeline: the protocols of its loop, and the client that takes and commits shards."""
