"""The pipeline's ports: protocols for everything outside of the process. Each adapter is one file; the embedded and the
deployed adapters pass the same contract tests."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from pipeline.counters import DeadLetterCounts, UnexpectedErrors
from pipeline.tracing import NO_TRACES, Traces
from schemas.settings.kv_transfer import Role
from schemas.workers.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An entry of a listing. `size` in bytes."""

    key: str
    size: int


class ObjectStore(Protocol):
    """Object storage, the source of truth. Keys are relative paths with '/' between parts; an object is written once
    and is complete as soon as it is visible."""

    def create(self, key: str, data: bytes | Path) -> bool:
        """Create the object durably; False if it exists already (the race is lost, nothing changed)."""
        ...

    def read(self, key: str) -> bytes:
        """The whole object; raises `ObjectNotFound`."""
        ...

    def open(self, key: str) -> BinaryIO:
        """A seekable stream over the object; raises `ObjectNotFound`."""
        ...

    def info(self, key: str) -> ObjectInfo | None:
        """Size of an object, or None if there is none."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix`, in key order; only those after the key `after`, which need not
        exist."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Prefixes ("a/b/") directly below `prefix` (which ends in "/"), in order, without listing their contents. One
        may be empty."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite: only for caches such as progress.json, whose loss changes nothing."""
        ...

    def locate(self, key: str) -> str:
        """The location of the object (or of the store, for "" and prefixes) for messages: a path or a URL."""
        ...


def queue_name(model: str, tier: str) -> str:
    """The name of the queue for one model's shards of one tier. `model`: its `ModelPin.key`."""
    return f"{model}.{tier}"


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A message on the shard queue: it names the shard and carries no content. `job` is the job's id, `shard` the
    shard's number (also its part's number)."""

    job: str
    shard: int
    attempt: int = 1


class ShardQueue(Protocol):
    """Delivers shards to workers. The queue may lose, repeat, delay or reorder tasks: it is only a hint.

    There is one queue for each kind of work (`queue_name`); every worker that can do the work takes from it. So the
    dispatcher needs no estimate of a worker's speed, and a worker that dies takes only its held shards with it.
    """

    def put(self, queue: str, task: ShardTask) -> None:
        """Append the task to the queue of this name."""
        ...

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """The next task of the first of `queues` that has one, or None after `timeout` seconds (0: at once)."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state that a worker reports with each heartbeat. All of it is a hint.

    Attributes:
        name: unique among live workers.
        models: models that it can serve without loading another (`ModelPin.key`).
        held: shards that it holds, each (job id, number).
        waiting_tokens: expected tokens of held shards that are not computed yet.
        tokens_per_second: measured; None: not measured yet.
        draining: it takes no more shards.
        price_per_hour: the worker's price; None: not configured.
        passed_over: shards that it took, could not work on, and won't take again for a while.
        max_num_seqs: rows of its engine's batch; None: no model is loaded yet.
        takes_lane_requests: it takes new interactive requests, those that are addressed to it included.
        role: what it computes of interactive requests.
    """

    name: str
    models: frozenset[str] = frozenset()
    held: frozenset[tuple[str, int]] = frozenset()
    waiting_tokens: int = 0
    tokens_per_second: float | None = None
    draining: bool = False
    price_per_hour: float | None = None
    passed_over: frozenset[tuple[str, int]] = frozenset()
    max_num_seqs: int | None = None
    takes_lane_requests: bool = False
    role: Role = "both"


class Heartbeats(Protocol):
    """Registry of live workers and of the shards that they hold. It may lose everything: it is only a hint."""

    @property
    def lifetime(self) -> float:
        """Seconds without a heartbeat after which a worker counts as dead."""
        ...

    def send_heartbeat(self, state: WorkerState) -> None:
        """Register the worker as alive, with this state."""
        ...

    def leave(self, worker: str) -> None:
        """Remove the worker after an orderly shutdown: it holds no shards any more."""
        ...

    def report_metrics(self, worker: str, metrics: WorkerMetrics) -> None:
        """Store the worker's metrics for monitoring. They are separate from its state, which is read by many processes
        many times a second; they expire as a heartbeat does."""
        ...

    def metrics(self) -> dict[str, WorkerMetrics]:
        """The latest metrics of each live worker, by name."""
        ...

    def workers(self) -> list[WorkerState]:
        """The latest state of each live worker, sorted by name."""
        ...

    def since(self) -> float:
        """Seconds for which heartbeats have been recorded without a gap. It restarts at zero after a loss: then a
        missing heartbeat does not mean a dead worker."""
        ...


class Lease(Protocol):
    """Selects one of several processes that could do the same work. It only saves work: two may hold it at times."""

    def renew(self) -> bool:
        """Acquire the lease if it is free, extend it if it is held here; returns whether it is held here now. It
        expires unless renewed."""
        ...

    def release(self) -> None:
        """Release the lease, so that another process needn't wait for its expiry."""
        ...


class Clock(Protocol):
    """Time and sleep; seconds."""

    def now(self) -> datetime:
        """Wall time, aware, UTC."""
        ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Randomness(Protocol):
    """Source of random bytes for ids."""

    def token(self, num_bytes: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class World:
    """The ports that a component of the pipeline uses."""

    store: ObjectStore
    clock: Clock
    random: Randomness
    scratch: Path = field(default_factory=lambda: Path("."))
    """Local folder for files that are built before they become objects."""
    traces: Traces = NO_TRACES
    dead_letters: DeadLetterCounts = field(default_factory=DeadLetterCounts)
    """Counts dead letters."""
    errors: UnexpectedErrors = field(default_factory=UnexpectedErrors)
    """Counts unexpected errors."""
    on_progress: Callable[[], None] = lambda: None
    """Called while a job is planned, after each batch of rows and each stored shard."""


class PipelineError(Exception):
    """Base class of the errors that the pipeline raises on purpose."""


class ComponentStopped(PipelineError):
    """Raised by a component that can't run and for which a retry is useless: its settings or its location are wrong.
    Ends the process."""


class ObjectNotFound(PipelineError):
    """Raised when a key that must exist is missing."""


class StoreError(PipelineError):
    """Raised when a store operation fails: not writable, full, no conditional writes, a bad key. Names the location and
    the reason. Nothing half-written is visible."""


class StoreUnavailable(StoreError):
    """Raised when a store is unreachable, busy, or out of space, and its retry time-out has passed. The same operation
    may succeed later. This one may or may not have taken effect."""


class StoreFull(StoreUnavailable):
    """Raised when a store is out of space. Writes succeed once space is freed; reads succeed meanwhile."""


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def failure_type(error: OSError) -> type[StoreError]:
    """The exception type for a failed write to a local disk."""
    return StoreFull if error.errno in NO_ROOM else StoreError


class OutputLocked(PipelineError):
    """Raised when another live run holds the output. The lock is never taken over: the kernel releases it when its
    owner ends."""


MESSAGE_OVERHEAD_BYTES: Final = 512
"""Maximum bytes of a message in addition to its key, value and headers; each header may take 32 more."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Headers are ordered; a name may occur more than once."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()

    @property
    def size(self) -> int:
        """Maximum size on the wire, in bytes."""
        headers = sum(32 + len(name) + len(value or b"") for name, value in self.headers)
        return MESSAGE_OVERHEAD_BYTES + len(self.key or b"") + len(self.value or b"") + headers


class NotConfirmed(PipelineError):
    """Raised when some messages were not confirmed. Others, or even these, may have been sent.

    Attributes:
        final: the broker refused them, and a retry would change nothing.
    """

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Messages(Protocol):
    """A message producer."""

    @property
    def max_bytes(self) -> int:
        """The largest `Message.size` that the broker accepts."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, in order for each key; returns when the broker has confirmed all. Raises `NotConfirmed`."""
        ...
