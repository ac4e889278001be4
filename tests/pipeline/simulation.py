"""A world in memory, for histories that a seed repeats: store, clock, randomness, and a queue that is not reliable."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from pipeline.adapters.object_keys import check_key, check_prefix
from pipeline.ports import ObjectInfo, ObjectNotFound, ShardTask, World

START = datetime(2026, 1, 1, tzinfo=UTC)


class MemoryStore:
    """An object store in memory.

    Attributes:
        log: the keys of all creations, in order.
        changes: creations and removals in order, as key and bytes, or None when it went.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})
        self.log: list[str] = []
        self.changes: list[tuple[str, bytes | None]] = []
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes | Path) -> bool:
        check_key(key)
        body = data if isinstance(data, bytes) else data.read_bytes()
        if isinstance(data, Path):
            data.unlink()
        with self._lock:
            if key in self.objects:
                return False
            self.objects[key] = body
            self.log.append(key)
            self.changes.append((key, body))
            return True

    def read(self, key: str) -> bytes:
        try:
            return self.objects[check_key(key)]
        except KeyError as error:
            raise ObjectNotFound(f"{key}: no such object") from error

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.read(key))

    def info(self, key: str) -> ObjectInfo | None:
        body = self.objects.get(check_key(key))
        return None if body is None else ObjectInfo(key, len(body))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        keys = [key for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        return iter([ObjectInfo(key, len(self.objects[key])) for key in keys])

    def folders(self, prefix: str) -> Iterator[str]:
        rests = [key.removeprefix(prefix) for key in self.objects if key.startswith(prefix)]
        return iter(sorted({f"{prefix}{rest.split('/')[0]}/" for rest in rests if "/" in rest}))

    def delete(self, key: str) -> None:
        with self._lock:
            if self.objects.pop(check_key(key), None) is not None:
                self.changes.append((key, None))

    def replace(self, key: str, data: bytes) -> None:
        self.objects[check_key(key)] = data

    def locate(self, key: str) -> str:
        return f"memory:{key}"


class SimulatedClock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class SeededRandomness:
    """The same bytes for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def token(self, num_bytes: int) -> bytes:
        return self._random.randbytes(num_bytes)


class ChaoticQueue:
    """A queue that loses, repeats and reorders tasks as the test says, and never waits; all names are one queue."""

    def __init__(self) -> None:
        self.tasks: list[ShardTask] = []
        self.put_count = 0

    def put(self, queue: str, task: ShardTask) -> None:
        self.tasks.append(task)
        self.put_count += 1

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        return self.tasks.pop(0) if self.tasks else None

    def lose(self, at: int) -> None:
        if self.tasks:
            del self.tasks[at % len(self.tasks)]

    def repeat(self, at: int) -> None:
        if self.tasks:
            self.tasks.append(self.tasks[at % len(self.tasks)])

    def shuffle(self, seed: int) -> None:
        random.Random(seed).shuffle(self.tasks)


def simulated_world(scratch: Path, seed: int = 0) -> World:
    """A world in memory; only files being built touch the disk."""
    return World(MemoryStore(), SimulatedClock(), SeededRandomness(seed), scratch)
