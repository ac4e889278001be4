"""Connections and the message producer on Kafka."""
