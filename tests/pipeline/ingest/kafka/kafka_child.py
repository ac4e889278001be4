"""Kafka ingest in a process of its own that kills itself at a given moment, or runs until it is killed: run as
`python -m tests.pipeline.ingest.kafka.kafka_child '{"bootstrap": …, "name": …, "folder": …, "moment": …}'`.

Moments: "before" the batch is created, its lines written; "batch": it is created, no job yet; "job": its first job is
accepted; "stored": all is, and the ingest doesn't know it yet; "committed": the offset is; "never".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.ingest.intake import Intake, JobDraft
from pipeline.ingest.kafka.consumer import KafkaIngest
from pipeline.ingest.kafka.micro_batches import INTAKE, PartitionId
from pipeline.ingest.kafka.partition import Handler
from pipeline.ingest.kafka.records import Record
from pipeline.jobs.submit import SubmittedJob
from pipeline.ports import ObjectStore
from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness


def die() -> None:
    """After a while, in which whatever the ingest does too early is done, such as a commit."""
    time.sleep(0.7)
    os.kill(os.getpid(), signal.SIGKILL)


class DyingStore:
    """A store that dies before or after it creates a batch."""

    def __init__(self, store: ObjectStore, moment: str) -> None:
        self._store = store
        self._moment = moment

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes | Path) -> bool:
        is_batch = key.startswith(INTAKE) and key.endswith(".json")
        if is_batch and self._moment == "before":
            die()
        created = self._store.create(key, data)
        if is_batch and self._moment == "batch":
            die()
        return created


class DyingIntake:
    """An intake that dies after it accepted a job."""

    def __init__(self, intake: Intake, moment: str) -> None:
        self._intake = intake
        self._moment = moment

    def accept(self, draft: JobDraft) -> SubmittedJob:
        submitted = self._intake.accept(draft)
        if self._moment == "job":
            die()
        return submitted

    def room_for(self, tenant: str) -> bool:
        return self._intake.room_for(tenant)


class DyingHandler:
    """Dies when all is stored, before the ingest knows it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def begin(self, partition_id: PartitionId, offset: int) -> int:
        return self._handler.begin(partition_id, offset)

    def store(self, partition_id: PartitionId, first: int, records: Sequence[Record]) -> int:
        end = self._handler.store(partition_id, first, records)
        die()
        return end


class DyingIngest(KafkaIngest):
    """Dies when it has committed an offset."""

    def _commit(self, now: float) -> None:
        durable = any(partition.durable is not None for partition in self._partitions.values())
        super()._commit(now)
        if durable:
            die()


def main() -> None:
    given = json.loads(sys.argv[1])
    moment = given["moment"]
    harness = KafkaHarness(
        given["bootstrap"],
        given["name"],
        Path(given["folder"]),
        lambda store: DyingStore(store, moment),  # type: ignore[return-value,arg-type]
    )
    settings = harness.settings(batch_records=given.get("batch_records", 5_000))
    intake = DyingIntake(Intake(harness.world), moment)
    handlers = harness.handlers(settings, intake)
    if moment == "stored":
        handlers = {topic: DyingHandler(handler) for topic, handler in handlers.items()}
    kind = DyingIngest if moment == "committed" else KafkaIngest
    kind(settings, handlers, intake.room_for, harness.world.clock).run(threading.Event())


if __name__ == "__main__":
    main()
