"""The pipeline's ports: all that it asks of the world outside. An adapter is one file; both the embedded and the
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
from schemas.workers.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of an object. `size` in bytes."""

    key: str
    size: int


class ObjectStore(Protocol):
    """The truth. Keys are relative paths with '/' between parts; an object is written once and is whole when seen."""

    def create(self, key: str, data: bytes | Path) -> bool:
        """Create the object durably; False if it exists already (the race is lost, nothing was changed)."""
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
        """Objects whose keys start with `prefix`, in key order; only those behind the key `after`, which need not
        exist."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Prefixes ("a/b/") directly below `prefix` (which ends in "/"), in order, without visiting what they hold. One
        may be empty."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object if it is there."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite: only for caches such as progress.json, whose loss changes nothing."""
        ...

    def locate(self, key: str) -> str:
        """How messages name the object (or, for "" and prefixes, the place): a path or a URL."""
        ...


def queue_name(model: str, tier: str) -> str:
    """The queue of one tier's shards of a model. `model`: its `ModelPin.key`."""
    return f"{model}.{tier}"


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What travels on the queue: a name, no content. `job` is the job's id, `shard` its number (part number too)."""

    job: str
    shard: int
    attempt: int = 1


class ShardQueue(Protocol):
    """Hands shards to workers; may lose, repeat, delay or reorder: only a hint.

    There is a queue for each kind of work (`queue_name`), and whoever can do it takes from it. So nobody need know how
    fast a worker is, and a worker that dies takes nothing with it but what it holds.
    """

    def put(self, queue: str, task: ShardTask) -> None:
        """Append to the queue of this name."""
        ...

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """The next task of the first of `queues` that has one, or None after `timeout` seconds (0: at once)."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker says of itself with each heartbeat. Hints, all of them.

    Attributes:
        name: unique among those that live.
        models: those that it can serve at once (`ModelPin.key`).
        held: shards that it has, each (job id, number).
        waiting_tokens: expected of what it holds and has not computed.
        tokens_per_second: measured; None: not yet.
        draining: it takes nothing more.
        price_per_hour: what it costs; None: it wasn't told.
        passed_over: shards that it took and could not work on, and takes no more for a while.
    """

    name: str
    models: frozenset[str] = frozenset()
    held: frozenset[tuple[str, int]] = frozenset()
    waiting_tokens: int = 0
    tokens_per_second: float | None = None
    draining: bool = False
    price_per_hour: float | None = None
    passed_over: frozenset[tuple[str, int]] = frozenset()


class Heartbeats(Protocol):
    """Who lives and what is in whose hands; may forget everything: only a hint."""

    @property
    def lifetime(self) -> float:
        """Seconds without a heartbeat after which a worker counts as dead."""
        ...

    def beat(self, state: WorkerState) -> None:
        """The worker lives, and this is how it stands."""
        ...

    def leave(self, worker: str) -> None:
        """The worker ends in order: it holds nothing any more."""
        ...

    def tell(self, worker: str, figures: WorkerMetrics) -> None:
        """What the worker has to tell whoever watches. Kept apart from its state, which many read many times a second;
        forgotten when the worker is silent for as long."""
        ...

    def figures(self) -> dict[str, WorkerMetrics]:
        """What workers that live have told last, by name."""
        ...

    def workers(self) -> list[WorkerState]:
        """Workers that live, as they said last, by name."""
        ...

    def since(self) -> float:
        """For how many seconds beats have been kept without a break. Where they were lost it begins anew: that nobody
        is heard of means nothing then."""
        ...


class Lease(Protocol):
    """Of several that could do the same work, one does it. It only saves work: now and then two may hold it."""

    def renew(self) -> bool:
        """Take it where it is free, keep it where it is held; whether it is held here now. Runs out when not
        renewed."""
        ...

    def release(self) -> None:
        """Give it back, so that another needn't wait."""
        ...


class Clock(Protocol):
    """Time and sleep; seconds."""

    def now(self) -> datetime:
        """Wall time, aware, UTC."""
        ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class Randomness(Protocol):
    """Where ids come from."""

    def token(self, num_bytes: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class World:
    """The ports a part of the pipeline is given, together."""

    store: ObjectStore
    clock: Clock
    random: Randomness
    scratch: Path = field(default_factory=lambda: Path("."))
    """A local folder for files being built before they become objects."""
    traces: Traces = NO_TRACES
    letters: DeadLetterCounts = field(default_factory=DeadLetterCounts)
    """Counts what could not become a request."""
    errors: UnexpectedErrors = field(default_factory=UnexpectedErrors)
    """Counts what was never foreseen."""
    on_progress: Callable[[], None] = lambda: None
    """Called while a job is planned, after each batch of rows and each stored shard."""


class PipelineError(Exception):
    """The root of what the pipeline raises on purpose."""


class PartStopped(PipelineError):
    """Raised by a part of a process that can't go on, however often it is tried: its settings or its place are wrong.
    Ends the process."""


class ObjectNotFound(PipelineError):
    """Raised when a key that must exist does not."""


class StoreError(PipelineError):
    """Raised when a store can't do what was asked: not writable, full, no conditional writes, a bad key. Names where
    and why. Nothing half-written is visible."""


class StoreUnavailable(StoreError):
    """Raised when a store can't be reached, is busy, or has no room, and has been for as long as was waited for it. The
    same may succeed later. What was asked may or may not have happened."""


class StoreFull(StoreUnavailable):
    """Raised when a store has no room. Writes succeed when somebody has made some; reads succeed meanwhile."""


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def failure_type(error: OSError) -> type[StoreError]:
    """The exception for a write to a local disk that failed."""
    return StoreFull if error.errno in NO_ROOM else StoreError


class OutputLocked(PipelineError):
    """Raised when another live run holds the output. Never taken over: the kernel frees it when its owner ends."""


MESSAGE_OVERHEAD_BYTES: Final = 512
"""Bytes of a message besides its key, value and headers, at most; each header may take 32 more."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Headers are in order, and a name may come more than once."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()

    @property
    def size(self) -> int:
        """Bytes that it takes on the way, at most."""
        headers = sum(32 + len(name) + len(value or b"") for name, value in self.headers)
        return MESSAGE_OVERHEAD_BYTES + len(self.key or b"") + len(self.value or b"") + headers


class NotConfirmed(PipelineError):
    """Raised when some messages were not confirmed; others, or even these, may have been sent all the same.

    Attributes:
        final: they were refused, and to send them again would change nothing.
    """

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Messages(Protocol):
    """Where messages are sent."""

    @property
    def most_bytes(self) -> int:
        """The largest `Message.size` that is taken."""
        ...

    def send(self, messages: Sequence[Message]) -> None:
        """Return when the broker has confirmed them all, in order for each key; raises `NotConfirmed`."""
        ...
