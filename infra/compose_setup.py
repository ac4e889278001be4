"""Creates the bucket and the Kafka topics for compose.yaml's processes; skips those that exist."""

from __future__ import annotations

import json
import os
from typing import Final

import boto3
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError

TOPICS: Final = ("requests", "jobs", "results", "events", "deadletter")
PARTITIONS: Final = 3


def make_bucket(name: str) -> None:
    """Create the bucket unless it exists. Raises boto3's errors."""
    s3 = boto3.client("s3", endpoint_url=os.environ["TOKENMILL_S3__ENDPOINT"])
    if name not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}:
        s3.create_bucket(Bucket=name)
        print(f"created the bucket {name}", flush=True)


def make_topics(bootstrap: list[str]) -> None:
    """Create the topics that are missing. Raises kafka-python's errors."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        missing = sorted({f"tokenmill.{name}" for name in TOPICS} - set(admin.list_topics()))
        if missing:
            admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in missing])
            print(f"created the topics {', '.join(missing)}", flush=True)
    except TopicAlreadyExistsError:  # another process created it first
        pass
    finally:
        admin.close()


if __name__ == "__main__":
    make_bucket(os.environ["TOKENMILL_ROOT"].removeprefix("s3://").partition("/")[0])
    make_topics(json.loads(os.environ["TOKENMILL_KAFKA__BOOTSTRAP_SERVERS"]))
