"""Produces requests to the topic of requests, and consumes their results from the topic of results.

python examples/kafka_producer.py BOOTSTRAP MODEL       such as localhost:9092; needs kafka-python
"""

from __future__ import annotations

import json
import sys
import uuid

from kafka import KafkaConsumer, KafkaProducer


def main(bootstrap: str, model: str) -> None:
    batch = uuid.uuid4().hex[:8]
    consumer = KafkaConsumer(
        "tokenmill.results", bootstrap_servers=bootstrap, group_id=None, auto_offset_reset="earliest"
    )
    # Idempotence needs a broker that supports transactions; without it a resend within the window is one request, too.
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=False)
    waiting = set()
    for number in range(5):
        custom_id = f"{batch}-{number}"
        value = {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": f"{number} plus one is", "max_tokens": 8, "temperature": 0},
        }
        producer.send("tokenmill.requests", json.dumps(value).encode(), key=custom_id.encode())
        waiting.add(custom_id)
    producer.flush()
    seen: set[bytes] = set()
    while waiting:
        for records in consumer.poll(1000).values():
            for record in records:
                result_id = dict(record.headers)["result_id"]
                row = json.loads(record.value)
                # Results are published at least once: a repeat carries the same result_id.
                if row["custom_id"] in waiting and result_id not in seen:
                    seen.add(result_id)
                    waiting.remove(row["custom_id"])
                    print(f"{row['custom_id']}: {row['status']}, {row.get('text')!r}")
    producer.close()
    consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
