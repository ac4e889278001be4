"""Samples of callers' requests that both versions of a model answered: numbers only, and nothing of the texts.

Gateways write them in small batches, while a release is open. An object's key begins with its time, so that objects are
listed in the order in which they were written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

import structlog

from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.models.evaluation import ShadowedShard
from pipeline.models.registry import RELEASES
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError, World
from schemas.releases import MAX_SAMPLES, Release, RequestSample, RequestSamples, Traffic

REQUESTS_PER_SAMPLE: Final = 16
"""Requests that are evaluated together, as the rows of a shard are."""

_MAX_AGE_SECONDS: Final = 5.0
_MAX_WAITING: Final = 1_000
"""Samples that wait for a store that can't be written; further ones are dropped."""

logger = structlog.get_logger(__name__)


class StoredSamples:
    """The samples of one release."""

    def __init__(self, store: ObjectStore, release: Release) -> None:
        self._store = store
        self._release = release
        self._prefix = f"{RELEASES}{release.id}/requests/"

    def write(self, batch: RequestSamples, token: str) -> None:
        """Store a batch; `token` distinguishes those of one moment."""
        self._store.create(f"{self._prefix}{batch.traffic}/{batch.at:%Y%m%dT%H%M%S%f}-{token}.json", batch.to_json())

    def read(self, traffic: Traffic, known: dict[str, RequestSamples | None]) -> list[RequestSamples]:
        """The stored batches, the first one first. `known`: a cache by key; new ones are added. A damaged batch is
        logged, and left out."""
        keys = sorted(info.key for info in self._store.list(f"{self._prefix}{traffic}/"))
        for key in keys:
            if key not in known:
                known[key] = self._parse(key)
        return [batch for key in keys if (batch := known[key]) is not None]

    def remove(self) -> None:
        """Remove all batches: the outcome has the comparison."""
        for key in [info.key for info in self._store.list(self._prefix)]:
            self._store.delete(key)

    def _parse(self, key: str) -> RequestSamples | None:
        try:
            return parse_stored(self._store.locate(key), self._store.read(key), RequestSamples)
        except (LedgerError, ObjectNotFound) as error:
            logger.warning("samples of requests can't be read", reason=str(error))
            return None


def grouped(batches: Iterable[RequestSamples], *, only_full: bool) -> list[ShadowedShard]:
    """The samples in groups of `REQUESTS_PER_SAMPLE`, as the evaluation takes them. `only_full`: without a last group
    that may still grow."""
    samples = [sample for batch in batches for sample in batch.samples]
    end = len(samples) - len(samples) % REQUESTS_PER_SAMPLE if only_full else len(samples)
    return [_group(samples[at : at + REQUESTS_PER_SAMPLE]) for at in range(0, end, REQUESTS_PER_SAMPLE)]


def _group(samples: Sequence[RequestSample]) -> ShadowedShard:
    agreements = [sample.agreement for sample in samples if sample.agreement is not None]
    pairs = [
        (sample.candidate, sample.stable)
        for sample in samples
        if not sample.candidate.failed and not sample.stable.failed
    ]
    return ShadowedShard(
        rows=len(samples),
        failed=sum(sample.candidate.failed and not sample.stable.failed for sample in samples),
        mended=sum(sample.stable.failed and not sample.candidate.failed for sample in samples),
        agreement=fmean(agreements) if agreements else None,
        latency=None,
        ttft=_log_ratio((now.ttft_seconds, was.ttft_seconds) for now, was in pairs),
        itl=_log_ratio((now.itl_seconds, was.itl_seconds) for now, was in pairs),
        length=_log_ratio((now.tokens, was.tokens) for now, was in pairs),
    )


def _log_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The median logarithm of the ratios; None: there is no pair of positive numbers."""
    found = [math.log(now / was) for now, was in pairs if now and was]
    return median(found) if found else None


@dataclass(slots=True)
class _Batch:
    """Samples that are not written yet, of one release and traffic. `since`: of the first one, monotonic."""

    release: Release
    since: float
    samples: list[RequestSample] = field(default_factory=list)
    dropped: int = 0


class SampleBuffer:
    """Collects one gateway's samples, and writes them in batches. Any thread may add some; one calls `flush`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lock = threading.Lock()
        self._batches: dict[tuple[str, Traffic], _Batch] = {}

    def add(self, release: Release, traffic: Traffic, sample: RequestSample) -> None:
        """Add a sample. It is dropped where too many wait."""
        with self._lock:
            batch = self._batch(release, traffic)
            if len(batch.samples) < _MAX_WAITING:
                batch.samples.append(sample)
            else:
                batch.dropped += 1

    def count_dropped(self, release: Release, traffic: Traffic) -> None:
        """Count a copy that was not sent, or is not compared."""
        with self._lock:
            self._batch(release, traffic).dropped += 1

    def flush(self, open_releases: Mapping[str, Release]) -> None:
        """Write what is full, old, or has a lost request; forget what belongs to no open release. An unavailable store
        is logged, and tried again with the next call."""
        for batch, traffic in self._take(open_releases):
            try:
                self._write(batch, traffic)
            except PipelineError as error:
                logger.warning("samples of requests can't be written", reason=str(error))
                with self._lock:
                    newer = self._batch(batch.release, traffic)
                    newer.samples[:0] = batch.samples
                    newer.dropped += batch.dropped

    def _batch(self, release: Release, traffic: Traffic) -> _Batch:
        return self._batches.setdefault((release.id, traffic), _Batch(release, self._world.clock.monotonic()))

    def _take(self, open_releases: Mapping[str, Release]) -> Iterator[tuple[_Batch, Traffic]]:
        now = self._world.clock.monotonic()
        with self._lock:
            due = [key for key, batch in self._batches.items() if key[0] not in open_releases or _is_due(batch, now)]
            taken = [(self._batches.pop(key), key[1]) for key in due]
        return (one for one in taken if one[0].release.id in open_releases)

    def _write(self, batch: _Batch, traffic: Traffic) -> None:
        stored = StoredSamples(self._world.store, batch.release)
        while batch.samples:
            written = tuple(batch.samples[:MAX_SAMPLES])
            record = RequestSamples(
                release=batch.release.id, traffic=traffic, at=self._world.clock.now(), samples=written,
                dropped=batch.dropped,
            )  # fmt: skip
            stored.write(record, self._world.random.token(8).hex())
            del batch.samples[:MAX_SAMPLES]
            batch.dropped = 0


def _is_due(batch: _Batch, now: float) -> bool:
    """Only samples, whose number is bounded, are a reason to write."""
    is_old = bool(batch.samples) and now - batch.since >= _MAX_AGE_SECONDS
    return is_old or len(batch.samples) >= REQUESTS_PER_SAMPLE or any(sample.lost for sample in batch.samples)
