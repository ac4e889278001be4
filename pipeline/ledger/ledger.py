"""The ledger of one job: its objects in the store, and the job's state that follows from them.

Each object is written once, and the writes may stop after any one of them: no reader needs two objects to be written at
the same moment. A job's state is computed from the objects that exist (`status`); it is never stored.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import orjson
import structlog
from pydantic import ValidationError

from pipeline.ledger.records import AttemptRecord, EndRecord, PlanningFailure, RunRecord, Tombstone, UnreadableRecord
from pipeline.ports import ObjectInfo, ObjectNotFound, ObjectStore, PipelineError
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.jobs.plan import PlanSegment, ShardRef
from schemas.jobs.progress import Progress
from schemas.stored import StoredModel

JOB = "job.json"
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
CLOSING = "closing.json"
TOMBSTONE = "tombstone.json"
SEGMENTS = "plan/"
SHARDS = "plans/"
RESULTS = "results/"
WORK = "work/"
JOBS = "jobs/"
"""Prefix of the jobs of a root."""
CLOSE = "close/"
"""Prefix of the markers of a root's jobs that may have a closing."""
OWN_FILES = (JOB, MANIFEST, PROGRESS, CLOSING, TOMBSTONE)
OWN_FOLDERS = (RESULTS, SEGMENTS, SHARDS, WORK)

LATEST_VERSION = 1
"""The latest format version of stored records that this reader supports."""

REJECTS = 0
"""Number of the part with the rows that the first segment refused: it exists before any work begins."""

_PART = re.compile(r"part-(\d{5,})\.parquet")
_CHUNK = 1 << 20
SomeRecord = TypeVar("SomeRecord", bound=StoredModel)

logger = structlog.get_logger(__name__)


class LedgerError(PipelineError):
    """Raised when an object in the ledger is damaged, contradictory, or of a later format version."""


class LaterVersion(LedgerError):
    """Raised when an object was written by a later tokenmill. It isn't damaged, and is left to that version."""


class PlanDamaged(LedgerError):
    """Raised when a plan segment can't be read, or isn't of this plan: the job's rows are then unknown."""


class ClosingDamaged(LedgerError):
    """Raised when a job is being closed before its time, and its closing record can't be read."""


class JobNotFound(PipelineError):
    """Raised when there is no job at a location."""


class ResultsRemoved(PipelineError):
    """Raised when the results of a job were requested after their retention period: they are removed."""


def part_key(number: int) -> str:
    """Key of a part, relative to the job."""
    return f"{RESULTS}part-{number:05d}.parquet"


def shard_key(attempt: str, number: int) -> str:
    """Key of a shard, relative to the job; `attempt`: the planner's attempt that wrote it."""
    return f"{SHARDS}{attempt}/shards/{number:05d}.parquet"


def rejects_key(attempt: str, number: int) -> str:
    """Key of the refused rows that will become part `number`, relative to the job; `attempt`: the planner's attempt
    that wrote them."""
    return f"{SHARDS}{attempt}/rejects/{number:05d}.parquet"


def segment_key(index: int) -> str:
    """Key of a plan segment, relative to the job."""
    return f"{SEGMENTS}{index:05d}.json"


def work_key(shard: int, name: str) -> str:
    """Key of an object that is private to the attempts on a shard, relative to the job."""
    return f"{WORK}{shard:05d}/{name}"


def part_number(key: str) -> int | None:
    """The number in a part's key or file name; None when it isn't one."""
    match = _PART.fullmatch(key.rsplit("/", 1)[-1])
    return int(match.group(1)) if match else None


class JobLedger:
    """Access to a job's objects in `store` under `prefix`: "" for an output folder, "jobs/ID/" below a root. It holds
    no state, so many may use one job."""

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix

    @property
    def in_root(self) -> bool:
        """Whether the job is one of many in a root, not an output folder of its own."""
        return self.prefix.startswith(JOBS)

    @property
    def name(self) -> str:
        """The job's name in its root; "" for an output folder."""
        return self.prefix.removeprefix(JOBS).rstrip("/")

    # -- the records

    def job(self) -> Job:
        """The job's order; raises `JobNotFound`."""
        found = self._read(JOB, Job)
        if found is None:
            raise JobNotFound(f"{self.location()}: there is no job here ({JOB} is missing)")
        return found

    def find_job(self) -> Job | None:
        """The job's order, or None when none was accepted yet."""
        return self._read(JOB, Job)

    def create_job(self, job: Job) -> bool:
        """Accept the order; False when another was accepted before."""
        return self.create(JOB, job.to_json())

    def manifest(self) -> Manifest | None:
        """The job's outcome, if it has ended."""
        return self._read(MANIFEST, Manifest)

    def has_ended(self) -> bool:
        """Whether the outcome exists (one existence check, no read)."""
        return self.store.info(self.prefix + MANIFEST) is not None

    def create_manifest(self, manifest: Manifest) -> bool:
        """End the job; False when it has ended already."""
        return self.create(MANIFEST, manifest.to_json())

    def closing(self) -> Closing | None:
        """The record that ends the job before its time, if there is one."""
        try:
            return self._read(CLOSING, Closing)
        except LedgerError as error:
            raise ClosingDamaged(str(error)) from error

    def create_closing(self, closing: Closing) -> bool:
        """End the job before its time; False when a closing exists, which then counts. In a root, the marker for
        dispatchers is created first: they poll all jobs at once, with one listing."""
        if self.in_root:
            self.store.create(CLOSE + self.name, b"")
        return self.create(CLOSING, closing.to_json())

    def tombstone(self) -> Tombstone | None:
        """The record of the removal of the results, which may be under way; None: all results exist."""
        return self._read(TOMBSTONE, Tombstone)

    def create_tombstone(self, tombstone: Tombstone) -> bool:
        """Record that the results are being removed; False when it was recorded before."""
        return self.create(TOMBSTONE, tombstone.to_json())

    def check_results(self) -> None:
        """Raise `ResultsRemoved` when the results are removed."""
        tombstone = self.tombstone()
        if tombstone is not None:
            raise ResultsRemoved(
                f"{self.location(RESULTS)}: the results were removed at {tombstone.at.isoformat(timespec='seconds')}, "
                "after their retention period; submit the input again to have it answered anew"
            )

    def progress(self) -> Progress | None:
        """The cached progress as of its `as_of`; None when there is none, or when it can't be read (it is only a
        cache)."""
        try:
            return self._read(PROGRESS, Progress)
        except LedgerError:
            return None

    def cache_progress(self, progress: Progress) -> None:
        """Replace the cached progress."""
        self.store.replace(self.prefix + PROGRESS, progress.to_json())

    # -- the plan

    def segment(self, index: int) -> PlanSegment | None:
        """The segment, if it exists."""
        try:
            segment = self._read(segment_key(index), PlanSegment)
        except LaterVersion:
            raise
        except LedgerError as error:
            raise PlanDamaged(str(error)) from error
        if segment is not None and segment.index != index:
            raise PlanDamaged(f"{self.location(segment_key(index))}: says that it is segment {segment.index}")
        return segment

    def segments(self, start: int = 0) -> Iterator[PlanSegment]:
        """The segments that exist, from index `start`, up to the first gap. Raises `PlanDamaged` where a segment is of
        another job than the previous one, or doesn't begin where that ends."""
        before: PlanSegment | None = None
        while (segment := self.segment(start if before is None else before.index + 1)) is not None:
            if before is not None and (segment.job, segment.first_row) != (before.job, before.end_row):
                raise PlanDamaged(
                    f"{self.location(segment_key(segment.index))}: begins job {segment.job} at row {segment.first_row}"
                    f", but job {before.job} goes on at row {before.end_row}: another plan; start anew with --fresh"
                )
            yield segment
            if segment.last:
                return
            before = segment

    def create_segment(self, segment: PlanSegment) -> bool:
        """Commit a segment of the plan; False when another planner was first and its segment counts."""
        return self.create(segment_key(segment.index), segment.to_json())

    def read_shard(self, shard: ShardRef) -> bytes:
        """The shard's file, verified against its hash."""
        data = self.store.read(self.prefix + shard.key)
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise LedgerError(
                f"{self.location(shard.key)}: its bytes are not those that were planned; the disk may be bad"
            )
        return data

    # -- the parts

    def has_part(self, number: int) -> bool:
        """Whether the shard is done (one existence check, no listing)."""
        return self.store.info(self.prefix + part_key(number)) is not None

    def create_part(self, number: int, file: Path) -> bool:
        """The commit point: make the built file the shard's part; False when another attempt's part exists."""
        return self.create(part_key(number), file)

    def parts(self) -> Iterator[tuple[int, ObjectInfo]]:
        """Parts that exist, by number, with their sizes; keys are relative to the job."""
        for info in self.store.list(self.prefix + RESULTS):
            number = part_number(info.key)
            if number is not None:
                yield number, ObjectInfo(info.key.removeprefix(self.prefix), info.size)

    def result_parts(self, manifest: Manifest | None) -> list[int]:
        """Numbers of the parts that hold the job's results: those that exist. For a job that failed as a whole, or
        ended before it was planned, only the parts that its manifest lists: a worker or a planner that has not read the
        manifest yet may still commit another part.

        Args:
            manifest: the job's, read before this call; with a manifest, the returned list is final.
        """
        if manifest is None or (manifest.files and manifest.status is not JobStatus.FAILED):
            return [number for number, _ in self.parts()]
        listed = (part_number(file.path) for file in manifest.files)
        return [number for number in listed if number is not None]

    def hash_part(self, number: int) -> str:
        """The sha256 of a part's bytes, streamed."""
        digest = hashlib.sha256()
        with self.store.open(self.prefix + part_key(number)) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    # -- attempts and runs

    def begin_attempt(self, shard: int, make: Callable[[int], AttemptRecord], *, first: int = 1) -> AttemptRecord:
        """Record a new attempt on a shard; `make` gets the attempt's number, `first` or the next free one."""
        number = first
        while True:
            record = make(number)
            key = work_key(shard, f"attempt-{number:04d}.json")
            if self.create(key, record.to_json()):
                return record
            standing = self.read_record(key, AttemptRecord)
            if standing is not None and standing.attempt_id == record.attempt_id:
                return standing  # this attempt's own record, whose confirmation was lost
            number += 1

    def attempts(self, shard: int) -> list[AttemptRecord]:
        """All attempts on a shard, in order. They are removed when the job has ended."""
        return self._records(work_key(shard, "attempt-"), AttemptRecord)

    def record_end(self, shard: int, record: EndRecord) -> None:
        """Record that an attempt ended without a commit; once for each attempt. It is the attempt's last write: after
        the job's end no component reads it, and all objects of attempts are removed.
        """
        self.create(work_key(shard, f"ended-{record.attempt_id}.json"), record.to_json())
        # Checked after the write: a job that ends later finds the record, and removes it then.
        try:
            ended = self.manifest() is not None
        except LedgerError:  # damaged: readers of the outcome report that
            return
        if ended:
            self.clear_work(shard)

    def ended(self, shard: int) -> list[EndRecord]:
        """Records of attempts on a shard that ended in order and without a commit."""
        return self._records(work_key(shard, "ended-"), EndRecord)

    def record_unreadable(self, shard: int, name: str, record: UnreadableRecord) -> None:
        """Record that an attempt could not continue with a shard. `name`: the attempt's."""
        self.create(work_key(shard, f"unreadable-{name}.json"), record.to_json())

    def unreadable(self, shard: int) -> list[UnreadableRecord]:
        """Records of attempts that could not continue with a shard: its objects can't be read, or the error was
        unexpected."""
        return self._records(work_key(shard, "unreadable-"), UnreadableRecord)

    def troubled(self) -> set[int]:
        """Shards with more than the record of one attempt. For all others their part has all facts. One listing."""
        objects = Counter(shard for shard, _ in self._attempt_objects())
        return {shard for shard, count in objects.items() if count > 1}

    def clear_work(self, shard: int | None = None) -> None:
        """Delete the objects of attempts, on one shard or on all; the records of runs stay. Only for jobs whose
        manifest
        is durable: it counts the deleted objects. An interruption leaves some of them."""
        if shard is None:
            keys = (info.key for _, info in self._attempt_objects())
        else:
            keys = (info.key for info in self._list(work_key(shard, "")))
        for key in keys:
            self.store.delete(key)

    def read_record(self, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
        """A private record of the job by its key; None when it is missing or damaged."""
        return self._find_record(key, kind)

    def record_planning_failure(self, make: Callable[[int], PlanningFailure]) -> int:
        """Record that planning failed once more; returns the number of failures, which `make` gets."""
        number = 1
        while not self.create(f"{WORK}planning/failed-{number:02d}.json", make(number).to_json()):
            number += 1
        return number

    def record_run(self, name: str, record: RunRecord) -> None:
        """Record that a run started or resumed the job."""
        self.create(f"{WORK}runs/{name}.json", record.to_json())

    def runs(self) -> list[RunRecord]:
        """All runs that started or resumed the job, the earliest first."""
        return sorted(self._records(f"{WORK}runs/", RunRecord), key=lambda record: record.started_at)

    # -- the state

    def status(self) -> JobStatus:
        """The job's status, computed from the objects that exist; raises `JobNotFound`."""
        manifest = self.manifest()
        if manifest is not None:
            return manifest.status
        self.job()
        closing = self.closing()
        if closing is not None:
            return JobStatus.FINALIZING if closing.kind == "expire" else JobStatus.CANCELLING
        if not self.has_part(REJECTS):
            return JobStatus.VALIDATING
        wanted = self.planned_parts()
        committed = {number for number, _ in self.parts()}
        return JobStatus.FINALIZING if wanted is not None and wanted <= committed else JobStatus.IN_PROGRESS

    def planned_parts(self) -> set[int] | None:
        """Numbers of all parts of the complete job; None while the plan isn't complete."""
        numbers, complete = set[int](), False
        for segment in self.segments():
            numbers.update(segment.parts)
            complete = segment.last
        return numbers if complete else None

    def location(self, key: str = "") -> str:
        """The location of the job, or of one of its objects, for messages."""
        return self.store.locate(self.prefix + key)

    def create(self, key: str, data: bytes | Path) -> bool:
        """Create an object of the job."""
        return self.store.create(self.prefix + key, data)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.store.list(self.prefix + prefix)

    def _attempt_objects(self) -> Iterator[tuple[int, ObjectInfo]]:
        """The objects of attempts: shard number and object, with the store's keys."""
        for info in self._list(WORK):
            folder = info.key.removeprefix(self.prefix + WORK).split("/", 1)[0]
            if folder.isdigit():
                yield int(folder), info

    def _records(self, key_prefix: str, kind: type[SomeRecord]) -> list[SomeRecord]:
        """Records whose keys start with `key_prefix`. Some may vanish meanwhile, because the job has just ended.
        Damaged
        records are skipped: they only save work, and no result depends on them."""
        found = (self._find_record(info.key.removeprefix(self.prefix), kind) for info in self._list(key_prefix))
        return [record for record in found if record is not None]

    def _find_record(self, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
        try:
            return self._read(key, kind)
        except LaterVersion:
            raise
        except LedgerError as error:
            logger.warning("a record of an attempt is damaged, and is skipped", reason=str(error))
            return None

    def _read(self, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
        try:
            data = self.store.read(self.prefix + key)
        except ObjectNotFound:
            return None
        return parse_stored(self.location(key), data, kind)


def parse_stored(where: str, data: bytes, kind: type[SomeRecord]) -> SomeRecord:
    """Parse a stored record from its JSON. Raises `LedgerError`, which names `where`, when the record is damaged or of
    a later version."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LedgerError(f"{where}: is not JSON ({error}); it was damaged outside tokenmill") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > LATEST_VERSION:
        raise LaterVersion(
            f"{where}: has format version {version}, but this tokenmill reads up to {LATEST_VERSION}; use a newer one"
        )
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in detail["loc"]) or "the whole"
        raise LedgerError(f"{where}: {field}: {detail['msg']}; it was damaged or written by another version") from error
