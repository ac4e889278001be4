"""Ingest of files, for buckets and folders alike: an uploaded file is a submission.

`FileIngestSource.take` is called for two reasons: an event that names a file, and a sweep through the listing, because
events get lost. Either may come repeatedly, in any order, and at several intakes: the job's id is derived from the
exact version of the file, and the first check is whether that job exists. So no state is needed. The markers below
`taken/` only save the sweep this check; a lost marker costs only time.

The source never moves a file. A file that can't become a job leaves a dead letter, and a marker as well.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal, Protocol

import structlog
from pydantic import AwareDatetime

from pipeline.ingest.dead_letters import DeadLetters, DeadLetterSource
from pipeline.ingest.files.options import (
    MAX_SIDECAR_BYTES,
    SIDECAR,
    InboxEntryKind,
    announces_sidecar,
    format_of,
    kind_of,
    options_of,
    sidecars_of,
)
from pipeline.ingest.intake import NO_MODEL, IntakePort, IntakeRefused, JobDraft
from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.planner.readers.source import SUFFIXES, suffix_of
from pipeline.ports import PipelineError, World
from schemas.jobs.inputs import InputFormat, InputRef
from schemas.stored import StoredModel

TAKEN: Final = "taken/"
logger = structlog.get_logger(__name__)


class FileStillChanging(PipelineError):
    """Raised when a file changes while it is read: it is incomplete."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a listing.

    Attributes:
        name: path relative to the inbox.  size: in bytes.
        stamp: changes whenever the file does, and sometimes when it doesn't.
    """

    name: str
    size: int
    stamp: str


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A version of a file, with its metadata.

    Attributes:
        version, etag: the store's ids of it, if it has such.
        metadata: set by its uploader.
    """

    entry: Entry
    modified: datetime
    version: str | None = None
    etag: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A job's pinned input, and the identity of its file version, from which the job's id is derived."""

    input: InputRef
    identity: tuple[str, ...]


class Inbox(Protocol):
    """A location that is watched for new files.

    Attributes:
        kind: of inbox: "bucket" or "folder".
        tenant: the inbox's tenant, by configuration: no file can change it.
    """

    @property
    def kind(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    def entries(self) -> Iterator[Entry]:
        """Files that are complete, as far as the inbox can determine."""
        ...

    def find(self, name: str, version: str | None = None) -> FileVersion | None:
        """The file's current version, or `version` if that can still be read; None when it is gone."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The first bytes of a small file, `max_bytes` at most; None when it doesn't exist. Raises `IntakeRefused` for
        anything but a file."""
        ...

    def pin(self, file: FileVersion, kind: InputFormat) -> PinnedFile:
        """Pin the file's bytes as an input. Raises `FileStillChanging`, or `IntakeRefused` for a file that can never be
        an input."""
        ...

    def uri(self, name: str) -> str:
        """The file's URI or path."""
        ...


class IngestResult(StrEnum):
    """The result of ingesting a file."""

    JOB = "job"
    KNOWN = "known"
    REFUSED = "refused"
    NO_ROOM = "no_room"
    WAITING = "waiting"
    GONE = "gone"
    PASSED_OVER = "passed_over"

    @property
    def settled(self) -> bool:
        """Whether the file needs no further attempt."""
        return self not in (IngestResult.NO_ROOM, IngestResult.WAITING)


class TakenMarker(StoredModel):
    """`taken/…`: this file became a job, or a dead letter. For people, and to save the sweep a check."""

    version: Literal[1] = 1
    uri: str
    stamp: str
    job: str | None = None
    dead_letter: str | None = None
    at: AwareDatetime


@dataclass(frozen=True, slots=True)
class FileIngestSettings:
    """Times in seconds.

    Attributes:
        sidecar_wait_seconds: how long after its upload a file waits for an announced sidecar.
        refresh_interval_seconds: how long the list of markers is cached. A replay may wait for so long.
    """

    sidecar_wait_seconds: float = 300.0
    refresh_interval_seconds: float = 30.0


class FileIngestSource:
    """Creates jobs from the files of one inbox. For one thread at a time; each other thread has a source of its own."""

    def __init__(
        self, inbox: Inbox, intake: IntakePort, world: World, settings: FileIngestSettings | None = None
    ) -> None:
        self.inbox = inbox
        self._intake = intake
        self._world = world
        self._dead_letters = DeadLetters(world)
        self._settings = settings or FileIngestSettings()
        self._marked: set[str] = set()
        self._marked_until = float("-inf")

    @property
    def tenant(self) -> str:
        return self.inbox.tenant

    def has_room(self) -> bool:
        """Whether the tenant may have more work queued."""
        return self._intake.room_for(self.inbox.tenant)

    def sweep(self) -> Counter[IngestResult]:
        """Ingest all files without a marker; returns the number of files by result. Files that fail are left for the
        next sweep, and don't delay the others."""
        self._refresh_marked()
        results = Counter[IngestResult]()
        for entry in self.inbox.entries():
            if kind_of(entry.name) is not InboxEntryKind.INPUT or self._is_marked(entry):
                continue
            try:
                result = self.take(entry.name)
            except PipelineError as error:
                logger.warning("file_not_ingested", uri=self.inbox.uri(entry.name), reason=str(error))
                result = IngestResult.WAITING
            results[result] += 1
            if result is IngestResult.NO_ROOM:  # nor will there be for the next one
                break
        return results

    def take(self, name: str, version: str | None = None) -> IngestResult:
        """Create a job from the file, unless it exists; for a sidecar, from the files to which it may belong.

        Args:
            name: path relative to the inbox.  version: from an event; None: the current one.

        Raises:
            PipelineError: it failed for now; a later retry is safe.
        """
        kind = kind_of(name)
        if kind is InboxEntryKind.SIDECAR:
            return self._take_files_of(name)
        if kind is InboxEntryKind.PASSED_OVER:
            return IngestResult.PASSED_OVER
        if not self.has_room():
            return IngestResult.NO_ROOM
        try:
            file = self.inbox.find(name, version)
            if file is None:
                return IngestResult.GONE
            if file.entry.size == 0:  # some programs first create an empty file, as an upload of its own
                return IngestResult.PASSED_OVER
            return self._take(file)
        except FileStillChanging:
            return IngestResult.WAITING

    def _take_files_of(self, sidecar: str) -> IngestResult:
        """Ingest the files that wait for this new sidecar now, not at the next sweep. Other files are unchanged."""
        stem = sidecar.removesuffix(SIDECAR)
        names = [stem] if suffix_of(stem) is not None else [stem + suffix for suffix in SUFFIXES]
        results = [self.take(name) for name in names]
        return next((result for result in results if not result.settled), IngestResult.PASSED_OVER)

    def _take(self, file: FileVersion) -> IngestResult:
        name = file.entry.name
        uri = self.inbox.uri(name)
        try:
            pinned = self.inbox.pin(file, format_of(name))
        except IntakeRefused as refused:
            return self._refuse(file, (file.entry.stamp,), refused)
        job_id = derived_job_id(file.modified, self.inbox.kind, *pinned.identity)
        if JobLedger(self._world.store, f"{JOBS}{job_id}/").find_job() is not None:
            self._mark(file.entry, job=job_id)
            return IngestResult.KNOWN
        try:
            metadata = file.metadata or {}
            sidecars = self._sidecars(name)
            if not sidecars and announces_sidecar(metadata, uri):
                if (self._world.clock.now() - file.modified).total_seconds() < self._settings.sidecar_wait_seconds:
                    return IngestResult.WAITING
                raise IntakeRefused(
                    "sidecar_missing",
                    f"{uri}: announces a sidecar, but none came within {self._settings.sidecar_wait_seconds:.0f} s; "
                    f"put {sidecars_of(name)[0]} beside it and replay this dead letter",
                )
            if not self._may_try(file, pinned.identity):
                return IngestResult.KNOWN
            options = options_of(name, metadata, sidecars, location=uri)
            submitted = self._intake.accept(JobDraft(pinned.input, options, self.inbox.tenant, job_id))
        except IntakeRefused as refused:
            if refused.code == NO_MODEL:  # the first worker will register its models
                return IngestResult.WAITING
            return self._refuse(file, pinned.identity, refused)
        self._mark(file.entry, job=job_id)
        logger.info("file_ingested", job=job_id, uri=uri, tenant=self.inbox.tenant)
        return IngestResult.JOB if submitted.created else IngestResult.KNOWN

    def _sidecars(self, name: str) -> list[tuple[str, bytes]]:
        found = ((sidecar, self.inbox.read(sidecar, MAX_SIDECAR_BYTES + 1)) for sidecar in sidecars_of(name))
        return [(self.inbox.uri(sidecar), data) for sidecar, data in found if data is not None]

    def _may_try(self, file: FileVersion, identity: tuple[str, ...]) -> bool:
        """Whether the file was never refused, or was replayed since. Otherwise its missing marker is created."""
        source = self._source(file, identity)
        if self._dead_letters.open_source(source) is not None:
            return True
        self._mark(file.entry)
        return False

    def _refuse(self, file: FileVersion, identity: tuple[str, ...], refused: IntakeRefused) -> IngestResult:
        source = self._dead_letters.open_source(self._source(file, identity))
        if source is None:
            self._mark(file.entry)
            return IngestResult.KNOWN
        marker = marker_key(self.inbox, file.entry)
        dead_letter = self._dead_letters.record(source, refused.code, str(refused), marker=marker)
        self._mark(file.entry, dead_letter=dead_letter)
        logger.warning(
            "file_refused", uri=source.place, code=refused.code, reason=str(refused), dead_letter=dead_letter
        )
        return IngestResult.REFUSED

    def _source(self, file: FileVersion, identity: tuple[str, ...]) -> DeadLetterSource:
        uri = self.inbox.uri(file.entry.name)
        return DeadLetterSource(self.inbox.kind, uri, "|".join(identity), file.modified)

    def _mark(self, entry: Entry, *, job: str | None = None, dead_letter: str | None = None) -> None:
        key = marker_key(self.inbox, entry)
        marker = TakenMarker(
            uri=self.inbox.uri(entry.name),
            stamp=entry.stamp,
            job=job,
            dead_letter=dead_letter,
            at=self._world.clock.now(),
        )
        self._world.store.create(key, marker.to_json())
        self._marked.add(key)

    def _is_marked(self, entry: Entry) -> bool:
        key = marker_key(self.inbox, entry)
        if key not in self._marked and self._world.store.info(key) is not None:
            self._marked.add(key)
        return key in self._marked

    def _refresh_marked(self) -> None:
        now = self._world.clock.monotonic()
        if now >= self._marked_until:
            self._marked = {info.key for info in self._world.store.list(marker_prefix(self.inbox.uri("")))}
            self._marked_until = now + self._settings.refresh_interval_seconds


def marker_prefix(uri: str) -> str:
    """The prefix of an inbox's markers. `uri`: of the inbox."""
    return f"{TAKEN}{_hash(uri.rstrip('/'))}/"


def marker_key(inbox: Inbox, entry: Entry) -> str:
    """Key of the marker of a listed file. Its prefix depends only on the file's URI, so that one listing finds markers
    of files that are gone."""
    return f"{marker_prefix(inbox.uri(''))}{marker_name_prefix(inbox.uri(entry.name))}-{_hash(entry.stamp)}"


def marker_name_prefix(uri: str) -> str:
    """The prefix of the names of a file's markers."""
    return _hash(uri)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
