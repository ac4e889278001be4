"""Sends inputs through every ingest source, as careful senders do: an unconfirmed input is sent again with its name.

Senders reach S3 directly, not through the failing proxy. A file that is written twice counts as two inputs, so a sender
that doesn't know whether it wrote would blur the check.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Final

from celery import Celery
from celery.exceptions import CeleryError
from kafka import KafkaProducer
from kafka.errors import KafkaError
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from tests.cluster.cluster import BUCKET, Cluster
from tests.cluster.faults_plan import JobInput

SEND_TIMEOUT_SECONDS: Final = 120.0
"""Seconds after which a sender gives up; no outage lasts as long."""

ANSWER_SECONDS: Final = 8.0
PAUSE: Final = 0.5

Entry = tuple[bytes, bytes, list[tuple[str, bytes]]]
"""Key, value and headers of a record."""


class NotSent(Exception):
    """Raised when a source took nothing within `SEND_TIMEOUT_SECONDS`."""


class Senders:
    """All sources of a cluster. Threads may share one. `sent`: all inputs, in the order in which sending began.

    Attributes:
        again: how often an input was sent again because it was unconfirmed.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._s3 = cluster.s3.client()
        self._lock = threading.Lock()
        self.sent: list[JobInput] = []
        self.again = 0

    def send(self, job_input: JobInput) -> None:
        """Send it, and return when the source has confirmed it. Raises `NotSent`."""
        with self._lock:
            self.sent.append(job_input)
        deadline = None if job_input.deadline is None else f"{job_input.deadline}s"
        options = {} if deadline is None else {"deadline": deadline}
        if job_input.source in ("bucket", "bucket bulk"):
            folder = "incoming/bulk/" if job_input.source == "bucket bulk" else "incoming/"
            self._put(f"{folder}{job_input.label}.jsonl", job_input, {f"tokenmill-{k}": v for k, v in options.items()})
        elif job_input.source == "kafka jobs":
            uri = self._put(f"elsewhere/{job_input.label}.jsonl", job_input)
            value = json.dumps({"uri": uri, "options": options}).encode()
            self._produce("tokenmill.jobs", [(job_input.label.encode(), value, [])])
        elif job_input.source == "kafka records":
            headers = [("job", job_input.label.encode()), *((name, value.encode()) for name, value in options.items())]
            lines = job_input.lines
            # The same request again goes to the same partition, where it is known.
            records = [(line.custom_id or "none", line.text) for line in lines]
            self._produce("tokenmill.requests", [(key.encode(), text, headers) for key, text in records])
        elif job_input.source == "celery uri":
            self.call(
                "submit", f"submit-{job_input.label}", self._put(f"by-task/{job_input.label}.jsonl", job_input), options
            )
        else:
            self.call(
                "submit", f"submit-{job_input.label}", [json.loads(line.text) for line in job_input.lines], options
            )

    def cancel(self, job: str, name: str) -> str:
        """Cancel a job by Celery; the status that it then has."""
        return str(self.call("cancel", f"cancel-{name}", job)["status"])

    def call(self, task: str, name: str, argument: Any, options: dict[str, str] | None = None) -> Any:
        """The task's answer. Its id is derived from `name`, so it is the same task however often it is sent. Raises
        `NotSent`."""
        until, why = time.monotonic() + SEND_TIMEOUT_SECONDS, "no answer"
        while time.monotonic() < until:
            caller = Celery(f"caller-{name}", broker=self._cluster.redis.url, backend=self._cluster.redis.url)
            try:
                result = caller.send_task(
                    f"tokenmill.{task}", [argument], options or {}, queue="tokenmill", task_id=f"{self._seed}-{name}",
                    retry=False,
                )  # fmt: skip
                return result.get(timeout=ANSWER_SECONDS)
            except (CeleryError, KombuError, RedisError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
                self._count_again()
                time.sleep(PAUSE)
            finally:
                caller.close()
        raise NotSent(f"tokenmill.{task} for {name}: {why}")

    def _put(self, key: str, job_input: JobInput, metadata: dict[str, str] | None = None) -> str:
        self._s3.put_object(Bucket=BUCKET, Key=key, Body=job_input.data, Metadata=metadata or {})
        return f"s3://{BUCKET}/{key}"

    def _produce(self, topic: str, entries: list[Entry]) -> None:
        """Not idempotent: this broker would confirm records that it then loses with its process."""
        until, why, left = time.monotonic() + SEND_TIMEOUT_SECONDS, "", entries
        while left and time.monotonic() < until:
            left, why = self._try_producing(topic, left, why)
            if left:
                self._count_again()
                time.sleep(PAUSE)
        if left:
            raise NotSent(f"{len(left)} records for {topic}: {why}")

    def _try_producing(self, topic: str, entries: list[Entry], why: str) -> tuple[list[Entry], str]:
        """What was not confirmed, and why not."""
        try:
            producer = KafkaProducer(
                bootstrap_servers=self._cluster.kafka.bootstrap, enable_idempotence=False, acks="all",
                max_block_ms=5_000, request_timeout_ms=5_000, delivery_timeout_ms=20_000,
            )  # fmt: skip
        except KafkaError as error:
            return entries, str(error)
        left, futures = [], []
        try:
            for at, (key, value, headers) in enumerate(entries):
                try:
                    futures.append((entries[at], producer.send(topic, value, key=key, headers=headers)))
                except KafkaError as error:
                    left, why = entries[at:], str(error)
                    break
            for entry, future in futures:
                try:
                    future.get(timeout=25)
                except KafkaError as error:
                    left.append(entry)
                    why = str(error)
        finally:
            producer.close(timeout=2)
        return left, why

    def _count_again(self) -> None:
        with self._lock:
            self.again += 1
