"""Shadow copies: a candidate's results for shards that the stable version has committed, stored apart from job results,
and their comparison row by row.

A copy is one Parquet object of `RESULT_FIELDS`, created if absent, with `ShadowHead` in its footer. Its shard's part is
committed, so the stable version has answered all rows before, and no job waits for a candidate.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, median
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger.ledger import JOBS, JobLedger, LedgerError, parse_stored, part_key
from pipeline.models.evaluation import ShadowedShard
from pipeline.models.registry import RELEASES
from pipeline.ports import ObjectNotFound, ObjectStore
from schemas.jobs.arrow_schemas import RESULT_FIELDS
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.results import RowStatus
from schemas.releases import Release, ShadowHead

FOOTER: Final = b"tokenmill.shadow"
_COLUMNS: Final = ["row", "status", "text", "embedding", "started_at", "finished_at", "completion_tokens",
                   "prompt_tokens"]  # fmt: skip
_COMPUTED: Final = {RowStatus.SUCCEEDED.value, RowStatus.FAILED.value}


@dataclass(frozen=True, slots=True)
class ShadowComparison:
    """The comparison of one copy with its part; `shard` None: there is no row that both computed."""

    head: ShadowHead
    shard: ShadowedShard | None


class ShadowCopies:
    """The copies of one release."""

    def __init__(self, store: ObjectStore, release: Release) -> None:
        self._store = store
        self._release = release
        self._prefix = f"{RELEASES}{release.id}/shadow/"

    def key(self, job: str, shard: int) -> str:
        return f"{self._prefix}{job}-{shard:05d}.parquet"

    def standing(self) -> list[str]:
        """Keys of the stored copies."""
        return [info.key for info in self._store.list(self._prefix)]

    def has(self, job: str, shard: int) -> bool:
        return self._store.info(self.key(job, shard)) is not None

    def write(self, job: str, shard: int, finished: FinishedRows, worker: str, at: datetime) -> bool:
        """Store the candidate's results of the shard; False when another worker's copy is stored already."""
        head = ShadowHead(release=self._release.id, job=job, shard=shard, worker=worker, finished_at=at)
        rows = finished.table().select([field.name for field in RESULT_FIELDS])
        body = io.BytesIO()
        pq.write_table(rows.replace_schema_metadata({FOOTER: head.to_json()}), body, compression="zstd")
        return self._store.create(self.key(job, shard), body.getvalue())

    def compare(self, key: str) -> ShadowComparison | None:
        """Compare a copy with its part; None: either is removed. Raises `LedgerError` when the copy is damaged."""
        try:
            copy = _table(self._store.read(key))
            head = parse_stored(self._store.locate(key), (copy.schema.metadata or {}).get(FOOTER, b""), ShadowHead)
            ledger = JobLedger(self._store, f"{JOBS}{head.job}/")
            part = _table(self._store.read(ledger.prefix + part_key(head.shard)))
        except ObjectNotFound:
            return None
        except pa.ArrowInvalid as error:
            raise LedgerError(f"{self._store.locate(key)}: is not a whole Parquet file ({error})") from error
        return ShadowComparison(head, compare_rows(part.select(_COLUMNS), copy.select(_COLUMNS)))

    def remove(self) -> None:
        """Remove all copies: they contain answers, and the outcome has the comparison."""
        for key in self.standing():
            self._store.delete(key)


def compare_rows(stable: pa.Table, candidate: pa.Table) -> ShadowedShard | None:
    """Compare two versions' results (`RESULT_FIELDS`) on the rows that both computed. None: there are none."""
    theirs = {row["row"]: row for row in candidate.to_pylist()}
    pairs = [(row, theirs[row["row"]]) for row in stable.to_pylist() if row["row"] in theirs]
    pairs = [(was, now) for was, now in pairs if was["status"] in _COMPUTED and now["status"] in _COMPUTED]
    if not pairs:
        return None
    answered = [(was, now) for was, now in pairs if was["status"] == now["status"] == RowStatus.SUCCEEDED.value]
    alike = [likeness(was, now) for was, now in answered]
    return ShadowedShard(
        rows=len(pairs),
        failed=sum(_failed(now) and not _failed(was) for was, now in pairs),
        mended=sum(_failed(was) and not _failed(now) for was, now in pairs),
        agreement=fmean(alike) if alike else None,
        latency=median(ratios) if (ratios := list(_latencies(answered))) else None,
    )


def likeness(was: dict[str, Any], now: dict[str, Any]) -> float:
    """The similarity of two answers, 0 to 1. Vectors: their cosine. Texts: the share of the longer one up to the first
    differing character: text after it has another context, and can't be compared."""
    if was["embedding"] is not None and now["embedding"] is not None:
        return _cosine(was["embedding"], now["embedding"])
    first, second = was["text"] or "", now["text"] or ""
    longer = max(len(first), len(second))
    if first == second:
        return 1.0
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second))) / longer


def _cosine(first: list[float], second: list[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    if len(first) != len(second) or not lengths:
        return 0.0
    return max(0.0, sum(a * b for a, b in zip(first, second, strict=True)) / lengths)


def _failed(row: dict[str, Any]) -> bool:
    return bool(row["status"] == RowStatus.FAILED.value)


def _latencies(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[float]:
    """Logarithms of the ratios of the time per token, candidate to stable version, by answer."""
    for was, now in pairs:
        before, after = _seconds_a_token(was), _seconds_a_token(now)
        if before and after:
            yield math.log(after / before)


def _seconds_a_token(row: dict[str, Any]) -> float | None:
    if row["started_at"] is None or row["finished_at"] is None:
        return None
    seconds: float = (row["finished_at"] - row["started_at"]).total_seconds()
    return seconds / (row["completion_tokens"] or row["prompt_tokens"] or 1)


def _table(data: bytes) -> pa.Table:
    return pq.read_table(pa.BufferReader(data))
