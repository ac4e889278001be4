"""The pipeline's ports: all that it asks of the world outside. An adapter is one file; both the embedded and the
deployed adapters pass the same contract tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol


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

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix`, in key order."""
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


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What travels on the queue: a name, no content. `job` is the job's id, `shard` its number (part number too)."""

    job: str
    shard: int
    attempt: int = 1


class ShardQueue(Protocol):
    """Hands shards to workers; may lose, repeat, delay or reorder: only a hint."""

    def put(self, task: ShardTask) -> None: ...

    def take(self, timeout: float) -> ShardTask | None:
        """The next task, or None after `timeout` seconds."""
        ...


class Heartbeats(Protocol):
    """Which shards are in whose hands; may forget everything: only a hint. A shard is (job id, number)."""

    def beat(self, worker: str, held: Iterable[tuple[str, int]]) -> None:
        """The worker lives, and holds exactly these shards."""
        ...

    def held(self) -> set[tuple[str, int]]:
        """Shards held by workers that live."""
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


class PipelineError(Exception):
    """The root of what the pipeline raises on purpose."""


class ObjectNotFound(PipelineError):
    """Raised when a key that must exist does not."""


class StoreError(PipelineError):
    """Raised when a store can't do what was asked: not writable, full, no conditional writes, a bad key. Names where
    and why. Nothing half-written is visible."""


class OutputLocked(PipelineError):
    """Raised when another live run holds the output. Never taken over: the kernel frees it when its owner ends."""
