"""The ports of a root's processes: a store that fails, queues by name, a lease, topics and a partition of records.

What all processes share lies in `Broker`: it may lose, repeat, delay and forget, but for the topics and the committed
offset, which a real broker stores durably.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.ports import Clock, Message, NotConfirmed, ObjectInfo, ShardTask, StoreError, WorkerState
from pipeline.runtime.availability import ServiceUnavailable
from schemas.workers.metrics import WorkerMetrics
from tests.simulation.machine import Machine, Process
from tests.simulation.root.watch import RootWatch

LIFETIME = 12.0
"""Seconds of silence after which a worker counts as dead."""

LEASE_SECONDS = 6.0
ROOT = "/root/"
"""The URI prefix that the store reports for its objects, wherever their files are."""


@dataclass
class Broker:
    """The queues, heartbeats, lease and topics that all processes share.

    Attributes:
        holder: of the lease, until when.  split_until: until then each contender gets the answer that it holds it.
        away_until: until then queues, heartbeats and lease can't be reached.
        refuse, after: calls of the store that are still to fail, before and after they take effect.
        silent, mute: sends that are still to fail, likewise.
        topics: messages, in order.  committed: the partition's offset.
    """

    machine: Machine
    clock: Clock
    queues: defaultdict[str, list[tuple[float, ShardTask]]] = field(default_factory=lambda: defaultdict(list))
    beats: MemoryHeartbeats = field(init=False)
    holder: tuple[str, float] = ("", 0.0)
    split_until: float = 0.0
    away_until: float = 0.0
    lose: int = 0
    double: int = 0
    late: list[float] = field(default_factory=list)
    reorder: bool = False
    refuse: int = 0
    after: int = 0
    silent: int = 0
    mute: int = 0
    topics: list[Message] = field(default_factory=list)
    committed: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """All heartbeats are lost."""
        self.beats = MemoryHeartbeats(self.clock, LIFETIME)

    def clear(self) -> None:
        """All is lost that may be."""
        self.queues.clear()
        self.holder = ("", 0.0)
        self.forget()

    def check(self, what: str) -> None:
        """Raises `ServiceUnavailable` while the broker is away."""
        if self.machine.now < self.away_until:
            raise ServiceUnavailable(f"the broker can't be reached to {what}")


class RootStore:
    """`ObjectStore` of one process, over the real one."""

    def __init__(self, store: FolderStore, broker: Broker, process: Process, watch: RootWatch) -> None:
        self._store = store
        self._broker = broker
        self._process = process
        self._watch = watch

    def create(self, key: str, data: bytes | Path) -> bool:
        self._begin("store.create", key)
        won = self._store.create(key, data)
        self._end(key)
        self._watch.created(self._process, key, data if isinstance(data, bytes) else None, won=won)
        return won

    def read(self, key: str) -> bytes:
        self._begin("store.read", key)
        return self._store.read(key)

    def open(self, key: str) -> BinaryIO:
        self._begin("store.open", key)
        return self._store.open(key)

    def info(self, key: str) -> ObjectInfo | None:
        self._begin("store.info", key)
        return self._store.info(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._begin("store.list", prefix)
        return iter(list(self._store.list(prefix, after)))

    def folders(self, prefix: str) -> Iterator[str]:
        self._begin("store.folders", prefix)
        return iter(list(self._store.folders(prefix)))

    def delete(self, key: str) -> None:
        self._begin("store.delete", key)
        self._watch.deleted(key)
        self._store.delete(key)
        self._end(key)

    def replace(self, key: str, data: bytes) -> None:
        self._begin("store.replace", key)
        self._store.replace(key, data)
        self._end(key)

    def locate(self, key: str) -> str:
        return ROOT + key

    def _begin(self, call: str, key: str) -> None:
        self._process.point(call, key)
        if self._broker.refuse:
            self._broker.refuse -= 1
            self._fail(f"{ROOT}{key}: 503, slow down")

    def _end(self, key: str) -> None:
        if self._broker.after:
            self._broker.after -= 1
            self._fail(f"{ROOT}{key}: the connection was closed before an answer came")

    def _fail(self, why: str) -> None:
        self._process.troubled = True
        raise StoreError(why)


class RootQueue:
    """`ShardQueue` of one process."""

    def __init__(self, broker: Broker, process: Process, watch: RootWatch) -> None:
        self._broker = broker
        self._process = process
        self._watch = watch

    def put(self, queue: str, task: ShardTask) -> None:
        self._process.point("queue.put", f"{task.job} {task.shard}")
        broker = self._broker
        broker.check("put a shard")
        if broker.lose:
            broker.lose -= 1
            return
        ready = broker.machine.now + (broker.late.pop() if broker.late else 0.0)
        for _ in range(2 if broker.double else 1):
            broker.queues[queue].append((ready, task))
        broker.double = max(0, broker.double - 1)

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        self._process.point("queue.take")
        broker = self._broker
        broker.check("take a shard")
        for name in queues:
            tasks = broker.queues[name]
            ready = [at for at, (when, _) in enumerate(tasks) if when <= broker.machine.now]
            if not ready:
                continue
            at = ready[0]
            if broker.reorder:
                at, broker.reorder = broker.machine.chance.choice(ready), False
            task = tasks.pop(at)[1]
            self._watch.took(self._process, task)
            return task
        return None


class RootHeartbeats:
    """`Heartbeats` of one process."""

    lifetime = LIFETIME

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process

    def send_heartbeat(self, state: WorkerState) -> None:
        self._process.point("heartbeats.beat", f"{sorted(state.held)}", locked=True)
        self._broker.check("leave a heartbeat")
        self._broker.beats.send_heartbeat(state)

    def leave(self, worker: str) -> None:
        self._process.point("heartbeats.leave", worker)
        self._broker.check("take leave")
        self._broker.beats.leave(worker)

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        self._process.point("heartbeats.report_metrics", worker)
        self._broker.check("report metrics")
        self._broker.beats.report_metrics(worker, metrics)

    def metrics(self) -> dict[str, WorkerMetrics]:
        self._process.point("heartbeats.metrics")
        return self._broker.beats.metrics()

    def workers(self) -> list[WorkerState]:
        self._process.point("heartbeats.workers")
        self._broker.check("read the heartbeats")
        return self._broker.beats.workers()

    def since(self) -> float:
        self._broker.check("read since when heartbeats are stored")
        return self._broker.beats.since()


class RootLease:
    """`Lease` of one life of a process."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._name = f"{process.name}-{process.life}"

    def renew(self) -> bool:
        self._process.point("lease.renew")
        broker = self._broker
        broker.check("renew a lease")
        now = broker.machine.now
        if now < broker.split_until:
            return True
        holder, until = broker.holder
        if holder != self._name and now < until:
            return False
        broker.holder = (self._name, now + LEASE_SECONDS)
        return True

    def release(self) -> None:
        self._process.point("lease.release")
        self._broker.check("release a lease")
        if self._broker.holder[0] == self._name:
            self._broker.holder = ("", 0.0)


class RootMessages:
    """`Messages` of one process: a topic stores each record that it received, confirmed or not."""

    max_bytes = 1 << 20

    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process

    def send(self, messages: Sequence[Message]) -> None:
        self._process.point("messages.send", f"{len(messages)}")
        broker = self._broker
        if broker.silent:
            broker.silent -= 1
            raise NotConfirmed("no broker answers", final=False)
        mute = broker.mute > 0
        taken = broker.machine.chance.randint(1, len(messages)) if mute else len(messages)
        broker.topics += messages[:taken]
        if mute:
            broker.mute -= 1
            raise NotConfirmed("the brokers do not answer any more", final=False)
        self._process.point("messages.sent")
