"""The index of the answer store: segments of keys in memory, and the merging of small ones.

Objects never change, so what is loaded stays valid; a lookup lists the space at most once in `refresh_seconds`. Nothing
depends on the index: it is what the listed segments say.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import structlog

from pipeline.answers.segments import (
    KEY_TYPE,
    KEYS,
    AnswerFile,
    AnswersDamaged,
    KeySegment,
    joined,
    list_newest,
    read_segment,
    write_segment,
)
from pipeline.ports import Clock, ObjectNotFound, ObjectStore, StoreError
from schemas.settings.answers import AnswerOptions

MERGED_AT_ONCE: Final = 16
"""Segments of similar size that are merged to one; so each key is rewritten a few times at most."""
_FULL_SPACES_IN_MEMORY: Final = 4
_SPACES_IN_MEMORY: Final = 1_000
"""Beyond either, the least recently used are dropped."""

AnswerCount = Literal["hit", "miss", "damaged", "bytes"]
"""Lookups by result, and bytes written: segments of keys, and answers over HTTP."""

LOOKUP_RESULTS: Final[tuple[AnswerCount, ...]] = ("hit", "miss", "damaged")

logger = structlog.get_logger(__name__)


class AnswerStoreCounts:
    """Counts of a process's use of the answer store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[AnswerCount] = Counter()

    def add(self, what: AnswerCount, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._counts[what] += number

    def snapshot(self) -> dict[AnswerCount, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[AnswerCount, int]:
        """All counts, which start at zero again."""
        with self._lock:
            taken, self._counts = dict(self._counts), Counter()
        return taken


@dataclass(slots=True)
class _Space:
    """The loaded segments of a space, by key, the newest first; `damaged` ones aren't read again."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    segments: dict[str, KeySegment] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    refresh_at: float = float("-inf")

    @property
    def num_keys(self) -> int:
        return sum(len(segment.keys) for segment in list(self.segments.values()))


class AnswerIndex:
    """Finds the files of answers. Thread-safe.

    Args:
        refresh_seconds: answers that other processes have stored are found after so long; 0: at once.
        counts: of this process.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        options: AnswerOptions,
        counts: AnswerStoreCounts | None = None,
        refresh_seconds: float = 0.0,
    ) -> None:
        self.store = store
        self.options = options
        self.counts = counts or AnswerStoreCounts()
        self._clock = clock
        self._refresh_seconds = refresh_seconds
        self._spaces: OrderedDict[str, _Space] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, space: str, keys: Sequence[bytes]) -> list[AnswerFile | None]:
        """The file with the answer to each of these request keys. Raises `StoreError`."""
        wanted = np.frombuffer(b"".join(keys), dtype=KEY_TYPE)
        found: list[AnswerFile | None] = [None] * len(keys)
        left = np.arange(len(keys))
        after = self._clock.now() - self.options.retention
        for segment in self._segments(space):
            places = segment.find(wanted[left])
            for index, file in zip(left[places >= 0].tolist(), places[places >= 0].tolist(), strict=True):
                if segment.sources[file].at > after:
                    found[index] = segment.sources[file]
            left = np.array([index for index in left.tolist() if found[index] is None], dtype=np.int64)
            if not len(left):
                break
        return found

    def write(self, space: str, segment: KeySegment, name: str) -> None:
        """Store a segment; see `write_segment`. Raises `StoreError`."""
        self.counts.add("bytes", write_segment(self.store, space, segment, name))

    def merge(self, space: str) -> None:
        """Merge small segments, if there are many of a similar size. Several processes may do it at the same time: the
        merged one is equal. Raises `StoreError`."""
        self._segments(space)
        after = self._clock.now() - self.options.retention
        levels: defaultdict[int, list[tuple[str, KeySegment]]] = defaultdict(list)
        for key, segment in list(self._space(space).segments.items()):
            levels[max(1, len(segment.keys)).bit_length() // 4].append((key, segment))
        for segments in levels.values():
            if len(segments) < MERGED_AT_ONCE:
                continue
            live = joined(segment.live(after) for _, segment in segments)
            if len(live.keys):
                name = hashlib.sha256("\n".join(key for key, _ in segments).encode()).hexdigest()[:16]
                self.write(space, live, name)
            for key, _ in segments:
                self.store.delete(key)

    def _segments(self, space: str) -> list[KeySegment]:
        """The segments, the newest first, loaded as far as the tenant may have answers."""
        known = self._space(space)
        with known.lock:
            if self._clock.monotonic() >= known.refresh_at:
                self._load(space, known)
                self._drop_unused()
                known.refresh_at = self._clock.monotonic() + self._refresh_seconds
            return list(known.segments.values())

    def _load(self, space: str, known: _Space) -> None:
        segments: dict[str, KeySegment] = {}
        left, after = self.options.max_tenant_answers, self._clock.now() - self.options.retention
        for name in list_newest(self.store, f"{space}{KEYS}"):
            if name.at <= after or left <= 0:
                break
            if name.key in known.damaged:
                continue
            try:
                segments[name.key] = known.segments.get(name.key) or read_segment(self.store, name.key)
            except ObjectNotFound:  # merged or removed meanwhile
                continue
            except AnswersDamaged as error:
                known.damaged.add(name.key)
                self.counts.add("damaged")
                logger.warning("stored_answers_damaged", reason=str(error))
                continue
            left -= len(segments[name.key].keys)
        known.segments = segments

    def _space(self, space: str) -> _Space:
        with self._lock:
            known = self._spaces.setdefault(space, _Space())
            self._spaces.move_to_end(space)
            return known

    def _drop_unused(self) -> None:
        with self._lock:
            sizes = [space.num_keys for space in self._spaces.values()]
            most, total = _FULL_SPACES_IN_MEMORY * self.options.max_tenant_answers, sum(sizes)
            for size in sizes[:-1]:
                if total <= most and len(self._spaces) <= _SPACES_IN_MEMORY:
                    break
                self._spaces.popitem(last=False)
                total -= size


def find_or_none(index: AnswerIndex, space: str, keys: Sequence[bytes]) -> list[AnswerFile | None]:
    """As `AnswerIndex.find`; a store that can't be read has no answers."""
    try:
        return index.find(space, keys)
    except StoreError as error:
        logger.warning("stored_answers_unavailable", reason=str(error))
        return [None] * len(keys)
