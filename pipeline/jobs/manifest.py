"""The manifest, a job's outcome: added up from its parts' footers and verified before it is written.

Counting never reads rows. A mismatch (a part with other rows than its shard, a row too many or too few) is an error
that stops the job: no outcome is better than a wrong one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import pyarrow as pa

from pipeline.jobs.closing import CLOSER, ending
from pipeline.jobs.cost import JobCost, cost_by_model, per_million, worker_times
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ledger.records import EngineFacts, PartSummary
from pipeline.ports import PipelineError
from pipeline.results.part_files import PartEntry
from pipeline.results.shard_history import read_history
from schemas.jobs.job import Job
from schemas.jobs.outcome import Counts, FileEntry, JobError, JobStatus, Manifest, Usage, WorkerTime
from schemas.jobs.plan import PlanSegment
from schemas.jobs.results import RowStatus

Interval = tuple[datetime, datetime]
NOTHING: Final = WorkerTime()


class BrokenInvariant(PipelineError):
    """Raised when a job's parts contradict its plan: the number of input rows differs from the number of results. It
    is always a defect or a damaged store."""


class PartTotals:
    """Running totals of rows and tokens over parts."""

    def __init__(self, parts: Iterable[PartEntry] = ()) -> None:
        self._rows = dict.fromkeys((status.value for status in RowStatus), 0)
        self._tokens = dict.fromkeys(Usage.model_fields, 0)
        for part in parts:
            self.add(part)

    def add(self, part: PartEntry) -> None:
        for name in self._rows:
            self._rows[name] += getattr(part.summary.counts, name)
        for name in self._tokens:
            self._tokens[name] += getattr(part.summary.usage, name)

    def counts(self, total: int | None = None) -> Counts:
        """Rows by status; with `total`, rows without a result are pending."""
        done = sum(self._rows.values())
        pending = 0 if total is None else total - done
        return Counts(total=done if total is None else total, pending=pending, **self._rows)

    def usage(self) -> Usage:
        """Token usage of the parts."""
        return Usage(**self._tokens)


def check_parts(ledger: JobLedger, job: Job, segments: Sequence[PlanSegment], parts: Mapping[int, PartEntry]) -> None:
    """Check the invariants: each planned row has exactly one result, and the counts add up. Raises
    `BrokenInvariant`."""
    wanted = {number: rows for segment in segments for number, rows in segment.parts.items()}
    if wanted.keys() != parts.keys():
        different = sorted(wanted.keys() ^ parts.keys())[:5]
        raise BrokenInvariant(f"{ledger.location()}: parts and plan differ, first in {different}; the job is not ended")
    for number, rows in wanted.items():
        part = parts[number]
        where = ledger.location(part_key(number))
        if part.rows != rows:
            raise BrokenInvariant(f"{where}: holds {part.rows} results for {rows} rows; the job is not ended")
        if part.summary.job != job.id:
            raise BrokenInvariant(f"{where}: belongs to job {part.summary.job}, not to {job.id}; the job is not ended")
    rows_in = sum(segment.total for segment in segments)
    rows_out = sum(part.rows for part in parts.values())
    counts = PartTotals(parts.values()).counts()
    if not rows_in == rows_out == counts.total:
        raise BrokenInvariant(
            f"{ledger.location()}: {rows_in} rows in, {rows_out} rows out, {counts.total} counted; the job is not ended"
        )


def build_manifest(
    ledger: JobLedger,
    job: Job,
    segments: Sequence[PlanSegment],
    parts: Mapping[int, PartEntry],
    now: datetime,
    price_per_hour: float | None,
) -> Manifest:
    """The outcome of a job whose parts all exist; raises `BrokenInvariant`. Reads every part once, for its hash."""
    check_parts(ledger, job, segments, parts)
    ordered = [parts[number] for number in sorted(parts)]
    tally = PartTotals(ordered)
    counts, usage = tally.counts(), tally.usage()
    models = {shard.number: shard.model for segment in segments for shard in segment.shards}
    repeated, at_most, lost = _repeated(ledger, ordered)
    usage += repeated
    more = [(models[number], worked) for number, worked in lost]
    computed = [(models[part.number], part.summary) for part in ordered if part.number in models]
    spending = cost_by_model(computed, more, price_per_hour)
    spent = _spent(computed, more, price_per_hour)
    closing = ledger.closing() if counts.cancelled or counts.expired else None
    finished_at = max(part.summary.committed_at for part in ordered)
    wall = _seconds(_run_intervals(ledger, job, ordered, finished_at))
    engine_seconds = _seconds(_engine_intervals(ordered))
    return Manifest(
        job=job.id,
        status=ending(counts),
        counts=counts,
        reused=sum(segment.reused for segment in segments),
        usage=usage,
        repeated_at_most=usage.repeated + at_most,
        created_at=job.created_at,
        finished_at=finished_at,
        wall_seconds=wall,
        engine_seconds=engine_seconds,
        tokens_per_second=usage.completion / engine_seconds if engine_seconds else None,
        total_tokens_per_second=(usage.prompt + usage.completion) / engine_seconds if engine_seconds else None,
        busy_seconds=spent.seconds,
        price_per_hour=price_per_hour if spent.price_per_hour is None else spent.price_per_hour,
        cost=None if price_per_hour is None and not spent.seconds else spent.known,
        cost_per_million_tokens=per_million(spent.known, usage.prompt + usage.completion) if spent.cost else None,
        spending=spending,
        files=_files(ledger, ordered),
        models=job.models,
        engine=_last_engine(ordered),
        versions=_versions(ordered),
        ended_by=closing.kind if closing is not None else None,
    )


def failed_manifest(
    ledger: JobLedger, job: Job, parts: Mapping[int, PartEntry], now: datetime, errors: tuple[JobError, ...]
) -> Manifest:
    """The outcome of a job that can't be completed. It lists and counts `parts`; the other rows have no result, and the
    cost of attempts on them is not included."""
    ordered = [parts[number] for number in sorted(parts)]
    tally = PartTotals(ordered)
    return Manifest(
        job=job.id,
        status=JobStatus.FAILED,
        counts=tally.counts(),
        usage=tally.usage(),
        created_at=job.created_at,
        finished_at=now,
        wall_seconds=max(0.0, (now - job.created_at).total_seconds()),
        files=_files(ledger, ordered),
        models=job.models,
        engine=_last_engine(ordered),
        versions=_versions(ordered),
        errors=errors,
    )


def _files(ledger: JobLedger, parts: Iterable[PartEntry]) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(path=part_key(part.number), rows=part.rows, size=part.size, sha256=ledger.hash_part(part.number))
        for part in parts
    )


def _spent(
    parts: Sequence[tuple[str, PartSummary]], more: Sequence[tuple[str, WorkerTime]], price_per_hour: float | None
) -> JobCost:
    spent = JobCost()
    for worked in (*(one for _, summary in parts for one in worker_times(summary).values()), *(one for _, one in more)):
        spent.add(worked, price_per_hour)
    return spent


def _repeated(ledger: JobLedger, parts: Sequence[PartEntry]) -> tuple[Usage, int, list[tuple[int, WorkerTime]]]:
    """Wasted tokens that are in no part's usage, an upper bound of further tokens that were never logged, and the
    worker time of the former, each with its shard's number.

    An attempt that died lost the tokens that it sampled since its last durable checkpoint: the interval whose
    checkpoint was being written, and the one after. Attempts of one session died at the same time.
    """
    repeated, dead, lost = 0, set[str](), list[tuple[int, WorkerTime]]()
    troubled = ledger.troubled()
    for part in parts:
        summary = part.summary
        if part.number not in troubled and summary.attempt == 1 and summary.worker != CLOSER:
            continue
        history = read_history(ledger, part.number)
        ended = {record.attempt_id: record for record in ledger.ended(part.number)}
        accounted = worker_times(summary)
        for attempt in history.attempts:
            name = attempt.attempt_id
            sampled = max(ended[name].generated if name in ended else 0, history.logged.get(name, 0))
            repeated += max(0, sampled - summary.accounted.get(name, 0))
            worked = ended[name].worked if name in ended else history.worked.get(name, NOTHING)
            if (beyond := worked.seconds - accounted.get(name, NOTHING).seconds) > 0:
                lost.append((part.number, worked.model_copy(update={"seconds": beyond})))
            if name != summary.attempt_id and name not in ended:
                dead.add(attempt.session)
    exposed = max((part.summary.exposed for part in parts), default=0)
    return Usage(repeated=repeated), 2 * len(dead) * exposed, lost


def _run_intervals(ledger: JobLedger, job: Job, parts: Sequence[PartEntry], end: datetime) -> list[Interval]:
    """The intervals in which runs worked on the job: from a run's start to the last part before the next start."""
    starts = sorted({job.created_at, *(run.started_at for run in ledger.runs())})
    commits = [part.summary.committed_at for part in parts]
    intervals = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        of_run = [at for at in commits if at >= start and (following is None or at < following)]
        intervals.append((start, max(of_run, default=start if following else max(start, end))))
    return intervals


def _engine_intervals(parts: Iterable[PartEntry]) -> list[Interval]:
    found = ((part.summary.engine_started_at, part.summary.engine_finished_at) for part in parts)
    return [(start, end) for start, end in found if start is not None and end is not None]


def _seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of the intervals, in seconds: shards overlap in the running batch."""
    total, until = timedelta(), None
    for start, end in sorted(intervals):
        begin = start if until is None else max(start, until)
        if end > begin:
            total += end - begin
        until = end if until is None else max(until, end)
    return total.total_seconds()


def _last_engine(parts: Sequence[PartEntry]) -> EngineFacts:
    """The settings of the engine that made the latest commit."""
    computed = [part.summary for part in parts if part.summary.engine]
    return dict(max(computed, key=lambda summary: summary.committed_at).engine) if computed else {}


def _versions(parts: Sequence[PartEntry]) -> dict[str, str]:
    versions = {"python": platform.python_version(), "pyarrow": pa.__version__}
    try:
        versions["tokenmill"] = version("tokenmill")
    except PackageNotFoundError:  # run from a source tree that isn't installed
        versions["tokenmill"] = "unknown"
    for part in parts:
        versions.update(part.summary.versions)
    return versions
