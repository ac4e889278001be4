"""The door of dropped files, for buckets and folders alike: drop is submit.

Two ways lead to `FileIngestSource.take`: an event that names a file, and a sweep through the listing, because events
get lost.
Whichever comes, however often, in whatever order, and however many intakes there are: the job's id is made of the very
version of the file, and the first look is whether that job stands. So nothing has to be remembered. The markers below
`taken/` only spare the sweep that look; without one, all that is lost is time.

A file stays where it is. One that can't become a job leaves a dead letter, and a marker all the same.
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
    MOST_SIDECAR_BYTES,
    SIDECAR,
    InboxEntryKind,
    announces_sidecar,
    format_of,
    kind_of,
    options_of,
    sidecars_of,
)
from pipeline.ingest.intake import NO_MODEL, IntakeOptions, IntakeRefused, JobDraft
from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.planner.readers.source import SUFFIXES
from pipeline.ports import PipelineError, World
from schemas.jobs.inputs import InputFormat, InputRef
from schemas.stored import StoredModel

TAKEN: Final = "taken/"
logger = structlog.get_logger(__name__)


class FileStillChanging(PipelineError):
    """Raised when a file changes while it is read: it is not all there yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as a listing tells of it.

    Attributes:
        name: path below the drop place.  size: in bytes.
        stamp: changes whenever the file does, and sometimes when it doesn't.
    """

    name: str
    size: int
    stamp: str


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A version of a file, looked at by itself.

    Attributes:
        version, etag: the store's names for it, if it has such.
        metadata: what its uploader said of it.
    """

    entry: Entry
    modified: datetime
    version: str | None = None
    etag: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PinnedDrop:
    """What a job reads, and what makes this drop another than every other: the job's id is made of it."""

    input: InputRef
    identity: tuple[str, ...]


class Inbox(Protocol):
    """A place where files are dropped.

    Attributes:
        door: "bucket" or "folder".
        tenant: whose place it is, by configuration: nothing that is dropped can change it.
    """

    @property
    def door(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    def entries(self) -> Iterator[Entry]:
        """Files that are whole, as far as the place can tell."""
        ...

    def look(self, name: str, version: str | None = None) -> FileVersion | None:
        """The file as it is now, or its `version` if that can still be read; None when it is gone."""
        ...

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Up to so many bytes from a small file's beginning; None when it isn't there. Raises `IntakeRefused` for
        something that is no file."""
        ...

    def pin(self, drop: FileVersion, kind: InputFormat) -> PinnedDrop:
        """Fix what is read. Raises `FileStillChanging`, or `IntakeRefused` for what will never be an input."""
        ...

    def uri(self, name: str) -> str:
        """The file's URI or path."""
        ...


class IngestResult(StrEnum):
    """What became of a file that the door was told of."""

    JOB = "job"
    KNOWN = "known"
    REFUSED = "refused"
    NO_ROOM = "no_room"
    WAITING = "waiting"
    GONE = "gone"
    PASSED_OVER = "passed_over"

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do about it."""
        return self not in (IngestResult.NO_ROOM, IngestResult.WAITING)


class TakenMarker(StoredModel):
    """`taken/…`: this file became a job, or a dead letter. Says so to people, and spares the sweep a look."""

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
        sidecar_wait: how long after its upload a file waits for the sidecar that it announces.
        refresh_every: how long the markers that were seen are believed to stand. Until then a replay may wait.
    """

    sidecar_wait: float = 300.0
    refresh_every: float = 30.0


class FileIngestSource:
    """Makes jobs of the files of one inbox. One thread at a time; others have doors of their own."""

    def __init__(
        self, inbox: Inbox, intake: IntakeOptions, world: World, settings: FileIngestSettings | None = None
    ) -> None:
        self.inbox = inbox
        self._intake = intake
        self._world = world
        self._letters = DeadLetters(world)
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
        """Take all files that no marker is known of; how many ended how. What fails for now is left for the next sweep,
        and doesn't keep the others waiting."""
        self._refresh_marked()
        ended = Counter[IngestResult]()
        for entry in self.inbox.entries():
            if kind_of(entry.name) is not InboxEntryKind.INPUT or self._is_marked(entry):
                continue
            try:
                became = self.take(entry.name)
            except PipelineError as error:
                logger.warning("drop_not_taken", uri=self.inbox.uri(entry.name), reason=str(error))
                became = IngestResult.WAITING
            ended[became] += 1
            if became is IngestResult.NO_ROOM:  # nor will there be for the next one
                break
        return ended

    def take(self, name: str, version: str | None = None) -> IngestResult:
        """Make a job of the file, unless it was made before; a sidecar stands for the files that it may belong to.

        Args:
            name: path below the inbox's place.  version: that an event told of; None: the one that is there.

        Raises:
            PipelineError: it failed for now; to take the file again later is safe.
        """
        kind = kind_of(name)
        if kind is InboxEntryKind.SIDECAR:
            return self._take_for(name)
        if kind is InboxEntryKind.PASSED_OVER:
            return IngestResult.PASSED_OVER
        if not self.has_room():
            return IngestResult.NO_ROOM
        try:
            drop = self.inbox.look(name, version)
            if drop is None:
                return IngestResult.GONE
            if drop.entry.size == 0:  # some programs make the name before the bytes, as an upload of its own
                return IngestResult.PASSED_OVER
            return self._take(drop)
        except FileStillChanging:
            return IngestResult.WAITING

    def _take_for(self, sidecar: str) -> IngestResult:
        """A sidecar came: files that wait for it needn't wait for the next sweep. Others stay as they are."""
        stem = sidecar.removesuffix(SIDECAR)
        names = [stem] if stem.endswith(tuple(SUFFIXES)) else [stem + suffix for suffix in SUFFIXES]
        ended = [self.take(name) for name in names]
        return next((one for one in ended if not one.settled), IngestResult.PASSED_OVER)

    def _take(self, drop: FileVersion) -> IngestResult:
        name = drop.entry.name
        uri = self.inbox.uri(name)
        try:
            pinned = self.inbox.pin(drop, format_of(name))
        except IntakeRefused as refused:
            return self._refuse(drop, (drop.entry.stamp,), refused)
        job_id = derived_job_id(drop.modified, self.inbox.door, *pinned.identity)
        if JobLedger(self._world.store, f"{JOBS}{job_id}/").find_job() is not None:
            self._mark(drop.entry, job=job_id)
            return IngestResult.KNOWN
        try:
            metadata = drop.metadata or {}
            sidecars = self._sidecars(name)
            if not sidecars and announces_sidecar(metadata, uri):
                if (self._world.clock.now() - drop.modified).total_seconds() < self._settings.sidecar_wait:
                    return IngestResult.WAITING
                raise IntakeRefused(
                    "sidecar_missing",
                    f"{uri}: announces a sidecar, but none came within {self._settings.sidecar_wait:.0f} s; put "
                    f"{sidecars_of(name)[0]} beside it and replay this letter",
                )
            if not self._may_try(drop, pinned.identity):
                return IngestResult.KNOWN
            options = options_of(name, metadata, sidecars, place=uri)
            submitted = self._intake.accept(JobDraft(pinned.input, options, self.inbox.tenant, job_id))
        except IntakeRefused as refused:
            if refused.code == NO_MODEL:  # the first worker will say which there are
                return IngestResult.WAITING
            return self._refuse(drop, pinned.identity, refused)
        self._mark(drop.entry, job=job_id)
        logger.info("drop_taken", job=job_id, uri=uri, tenant=self.inbox.tenant)
        return IngestResult.JOB if submitted.created else IngestResult.KNOWN

    def _sidecars(self, name: str) -> list[tuple[str, bytes]]:
        found = ((sidecar, self.inbox.read(sidecar, MOST_SIDECAR_BYTES + 1)) for sidecar in sidecars_of(name))
        return [(self.inbox.uri(sidecar), data) for sidecar, data in found if data is not None]

    def _may_try(self, drop: FileVersion, identity: tuple[str, ...]) -> bool:
        """Whether the file was never refused, or was replayed since. One that wasn't gets the marker that it lacks."""
        source = self._source(drop, identity)
        if self._letters.open_source(source) is not None:
            return True
        self._mark(drop.entry)
        return False

    def _refuse(self, drop: FileVersion, identity: tuple[str, ...], refused: IntakeRefused) -> IngestResult:
        source = self._letters.open_source(self._source(drop, identity))
        if source is None:
            self._mark(drop.entry)
            return IngestResult.KNOWN
        letter = self._letters.record(source, refused.code, str(refused), marker=marker_key(self.inbox, drop.entry))
        self._mark(drop.entry, letter=letter)
        logger.warning("drop_refused", uri=source.place, code=refused.code, reason=str(refused), dead_letter=letter)
        return IngestResult.REFUSED

    def _source(self, drop: FileVersion, identity: tuple[str, ...]) -> DeadLetterSource:
        uri = self.inbox.uri(drop.entry.name)
        return DeadLetterSource(self.inbox.door, uri, "|".join(identity), drop.modified)

    def _mark(self, entry: Entry, *, job: str | None = None, letter: str | None = None) -> None:
        key = marker_key(self.inbox, entry)
        marker = TakenMarker(
            uri=self.inbox.uri(entry.name),
            stamp=entry.stamp,
            job=job,
            dead_letter=letter,
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
            self._marked = {info.key for info in self._world.store.list(markers_of(self.inbox.uri("")))}
            self._marked_until = now + self._settings.refresh_every


def markers_of(place: str) -> str:
    """Where the markers of a drop place lie, by the place's URI."""
    return f"{TAKEN}{_hash(place.rstrip('/'))}/"


def marker_key(inbox: Inbox, entry: Entry) -> str:
    """Key of the marker of a file as it was listed. Its beginning is the file's whatever it holds, so that markers of
    files that have gone can be told by a listing."""
    return f"{markers_of(inbox.uri(''))}{file_hash(inbox.uri(entry.name))}-{_hash(entry.stamp)}"


def file_hash(uri: str) -> str:
    """How the names of a file's markers begin."""
    return _hash(uri)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
