"""The pipeline's ports in the simulation: the real adapters, with a port call before each use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.ports import Clock, ObjectInfo, ShardTask, WorkerState
from schemas.workers.metrics import WorkerMetrics
from tests.simulation.machine import Machine, Process
from tests.simulation.watch import Watch

LIFETIME = 10.0
"""Seconds of silence after which a worker counts as dead."""


class ProcessStore:
    """`ObjectStore` of one process: a real `FolderStore`. `acknowledged` gets the keys of objects that stand for
    ever, as a create has reported."""

    def __init__(self, store: FolderStore, process: Process, acknowledged: set[str], watch: Watch) -> None:
        self._store = store
        self._process = process
        self._acknowledged = acknowledged
        self._watch = watch

    def create(self, key: str, data: bytes | Path) -> bool:
        self._process.point("store.create", key)
        won = self._store.create(key, data)
        self._count(key, won)
        # What goes when it is not needed any more is no loss.
        if "/work/" not in key and not key.startswith(("active/", "close/")):
            self._acknowledged.add(key)
        if won:
            self._watch.created(self._process, key, data if isinstance(data, bytes) else None)
        return won

    def _count(self, key: str, won: bool) -> None:
        machine = self._process.machine
        if "/results/" in key:
            machine.counters["commits" if won else "commits that lost the race"] += 1
        elif "/attempt-" in key and won and not key.endswith("-0001.json"):
            machine.counters["shards taken again"] += 1

    def read(self, key: str) -> bytes:
        self._process.point("store.read", key)
        return self._store.read(key)

    def open(self, key: str) -> BinaryIO:
        self._process.point("store.open", key)
        return self._store.open(key)

    def info(self, key: str) -> ObjectInfo | None:
        self._process.point("store.info", key)
        return self._store.info(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._process.point("store.list", prefix)
        return self._store.list(prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        self._process.point("store.folders", prefix)
        return self._store.folders(prefix)

    def delete(self, key: str) -> None:
        self._process.point("store.delete", key)
        self._store.delete(key)

    def replace(self, key: str, data: bytes) -> None:
        self._process.point("store.replace", key)
        self._store.replace(key, data)

    def locate(self, key: str) -> str:
        return key or "the store"


@dataclass(slots=True)
class Broker:
    """The queue and heartbeats that all processes share: loses, repeats, delays and reorders on faults."""

    machine: Machine
    clock: Clock
    tasks: list[tuple[float, ShardTask]] = field(default_factory=list)
    beats: MemoryHeartbeats = field(init=False)
    lose: int = 0
    double: int = 0
    late: list[float] = field(default_factory=list)
    reorder: bool = False

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """All heartbeats are lost."""
        self.beats = MemoryHeartbeats(self.clock, LIFETIME)

    def clear(self) -> None:
        """Everything is lost."""
        self.tasks.clear()
        self.forget()


class ProcessQueue:
    """`ShardQueue` of one process."""

    def __init__(self, broker: Broker, process: Process, watch: Watch) -> None:
        self._broker = broker
        self._process = process
        self._watch = watch

    def put(self, queue: str, task: ShardTask) -> None:
        self._process.point("queue.put", f"{task.shard}")
        broker = self._broker
        if broker.lose:
            broker.lose -= 1
            return
        ready = broker.machine.now + (broker.late.pop() if broker.late else 0.0)
        for _ in range(2 if broker.double else 1):
            broker.tasks.append((ready, task))
        broker.double = max(0, broker.double - 1)

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        self._process.point("queue.take")
        broker = self._broker
        ready = [at for at, (when, _) in enumerate(broker.tasks) if when <= broker.machine.now]
        if not ready:
            return None
        at = ready[0]
        if broker.reorder:
            at, broker.reorder = broker.machine.chance.choice(ready), False
        task = broker.tasks.pop(at)[1]
        self._watch.took(self._process, task.shard)
        return task


class ProcessHeartbeats:
    """`Heartbeats` of one process."""

    lifetime = LIFETIME

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process

    def send_heartbeat(self, state: WorkerState) -> None:
        self._process.point("heartbeats.beat", f"{sorted(state.held)}", locked=True)
        self._broker.beats.send_heartbeat(state)

    def leave(self, worker: str) -> None:
        self._process.point("heartbeats.leave", worker)
        self._broker.beats.leave(worker)

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        self._process.point("heartbeats.report_metrics", worker)
        self._broker.beats.report_metrics(worker, metrics)

    def metrics(self) -> dict[str, WorkerMetrics]:
        self._process.point("heartbeats.metrics")
        return self._broker.beats.metrics()

    def workers(self) -> list[WorkerState]:
        self._process.point("heartbeats.workers")
        return self._broker.beats.workers()

    def since(self) -> float:
        return self._broker.beats.since()
