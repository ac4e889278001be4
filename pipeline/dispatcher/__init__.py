"""The dispatcher finds and plans open jobs, queues their shards in a fair order, and ends the jobs."""
