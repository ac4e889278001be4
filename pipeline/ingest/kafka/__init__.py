"""Jobs and requests from Kafka topics."""
