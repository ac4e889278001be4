"""Dead letters: input that could not become a request, with the original, the reason and the source, so that nothing is
lost silently.

A dead letter's id is derived from its source. So an ingest source that dies between writing a dead letter and
acknowledging its input writes the same dead letter again, and finds it. The original is stored first and the dead
letter last: a visible dead letter is complete.

A replay sends a dead letter's original to its ingest source again. An object in a bucket or folder isn't sent: the
marker that keeps the source from retrying is deleted, and the source finds the file. If it is refused once more, that
is another dead letter (`open_source`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import parse_stored
from pipeline.ports import ObjectInfo, ObjectNotFound, ObjectStore, PipelineError, World
from schemas.stored import Count, StoredModel

LETTERS: Final = "deadletters/"
BUCKET_EVENTS: Final = "bucket-events"
"""Ingest source of messages that should be upload events."""
MAX_ORIGINAL_BYTES: Final = 16 << 20
"""Maximum bytes of an original that are stored; more than the longest line that is read."""
MAX_MESSAGE_CHARS: Final = 2_000
"""Maximum characters of a reason that are stored."""

Headers = Sequence[tuple[str, bytes | None]]
"""Ordered; a name may occur more than once."""


class DeadLetterNotFound(PipelineError):
    """Raised when there is no dead letter with an id."""


class CannotReplay(PipelineError):
    """Raised when a dead letter can't be replayed: it was replayed before, or its original is incomplete."""


@dataclass(frozen=True, slots=True)
class DeadLetterSource:
    """The source of an input, the same in each of its deliveries.

    Attributes:
        ingest_source: the one that can process it again, such as "kafka", "bucket", "folder".
        place: the location: a topic with its cluster, an object's URI, a queue.
        position: identifies it at its location: partition and offset, an object's version, a message's id.
        at: when it was created there, by the location's own clock: the newest dead letters are listed first.
    """

    ingest_source: str
    place: str
    position: str
    at: datetime


class DeadLetter(StoredModel):
    """`deadletters/ID.json`. Its original is stored under `deadletters/ID.original`, unless it is empty or stays at its
    source.

    Attributes:
        ingest_source, place, position, at: see `DeadLetterSource`.
        reason_code, message: why it could not become a request.
        key, headers: of a record, in base64.
        size: bytes of the original.  stored: bytes of the original that are stored, from its start.
        marker: key of the object that keeps its ingest source from retrying.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    version: Literal[1] = 1
    id: str
    ingest_source: str = Field(validation_alias="door", serialization_alias="door")
    place: str
    position: str
    at: AwareDatetime
    recorded_at: AwareDatetime
    reason_code: str
    message: str
    key: str | None = None
    headers: tuple[tuple[str, str | None], ...] = ()
    size: Count = 0
    stored: Count = 0
    marker: str | None = None

    def record_key(self) -> bytes | None:
        """The record's key as received."""
        return None if self.key is None else base64.b64decode(self.key)

    def record_headers(self) -> list[tuple[str, bytes | None]]:
        """The headers as received."""
        return [(name, None if value is None else base64.b64decode(value)) for name, value in self.headers]


class Replay(StoredModel):
    """`deadletters/ID.replay-NNNN.json`: the dead letter was replayed."""

    version: Literal[1] = 1
    at: AwareDatetime
    outcome: str


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A dead letter, and how often it was replayed."""

    dead_letter: DeadLetter
    replays: int


Send = Callable[[DeadLetter, bytes], str]
"""Sends a dead letter's original to its ingest source again; returns the outcome as text. Raises `PipelineError`."""


def dead_letter_id(source: DeadLetterSource) -> str:
    """The id of the dead letter of this source: the newest sort first."""
    made = derived_job_id(source.at, "dead letter", source.ingest_source, source.place, source.position)
    return f"dl-{made.removeprefix('job-')}"


def list_dead_letter_objects(store: ObjectStore, letter: str) -> list[ObjectInfo]:
    """All objects of the dead letter with this id, itself the last: as long as it exists the others can be found."""
    return sorted(store.list(f"{LETTERS}{letter}."), key=lambda info: info.key == _dead_letter_key(letter))


class DeadLetters:
    """The dead letters of a root. It holds no state, so many may write and read.

    Args:
        max_bytes: maximum bytes of an original that are stored. A longer one can be viewed, but not replayed.
    """

    def __init__(self, world: World, max_bytes: int = MAX_ORIGINAL_BYTES) -> None:
        self._world = world
        self._store = world.store
        self._max_bytes = max_bytes

    def record(
        self,
        source: DeadLetterSource,
        reason_code: str,
        message: str,
        original: bytes = b"",
        headers: Headers = (),
        *,
        key: bytes | None = None,
        marker: str | None = None,
    ) -> str:
        """Write the dead letter durably, once; returns its id. After that the source may forget the input.

        Args:
            original: empty when it stays at its source, such as an object in a bucket.
            key: of a record.  marker: see `DeadLetter`.
        """
        id_ = dead_letter_id(source)
        stored = original[: self._max_bytes]
        dead_letter = DeadLetter(
            id=id_,
            ingest_source=source.ingest_source,
            place=source.place,
            position=source.position,
            at=source.at,
            recorded_at=self._world.clock.now(),
            reason_code=reason_code,
            message=message[:MAX_MESSAGE_CHARS],
            key=None if key is None else _text(key),
            headers=tuple((name, None if value is None else _text(value)) for name, value in headers),
            size=len(original),
            stored=len(stored),
            marker=marker,
        )
        if stored:
            self._store.create(_original_key(id_), stored)
        if self._store.create(_dead_letter_key(id_), dead_letter.to_json()):
            self._world.dead_letters.record(source.ingest_source)
        return id_

    def open_source(self, source: DeadLetterSource) -> DeadLetterSource | None:
        """The source under which a refusal would be recorded now. None: it was refused, and no replay was requested."""
        attempt, times = source, 0
        while self._store.info(_dead_letter_key(dead_letter_id(attempt))) is not None:
            if not self._replays(dead_letter_id(attempt)):
                return None
            times += 1
            attempt = replace(source, position=f"{source.position} again {times}")
        return attempt

    def dead_letters(self) -> Iterator[DeadLetterEntry]:
        """All dead letters, the newest first."""
        dead_letter, replays = None, 0
        for info in self._store.list(LETTERS):
            name, _, suffix = info.key.removeprefix(LETTERS).partition(".")
            if suffix == "json":
                if dead_letter is not None:
                    yield DeadLetterEntry(dead_letter, replays)
                dead_letter, replays = self._read(name), 0
            elif dead_letter is not None and dead_letter.id == name:
                replays += suffix.startswith("replay-")
        if dead_letter is not None:
            yield DeadLetterEntry(dead_letter, replays)

    def find(self, letter: str) -> DeadLetterEntry:
        """The dead letter with this id. Raises `DeadLetterNotFound`."""
        return DeadLetterEntry(self._read(letter), len(self._replays(letter)))

    def original(self, letter: DeadLetter) -> bytes:
        """The stored bytes of the original. Raises `DeadLetterNotFound` when they are gone: the dead letter is being
        removed."""
        if not letter.stored:
            return b""
        key = _original_key(letter.id)
        try:
            return self._store.read(key)
        except ObjectNotFound as error:
            raise DeadLetterNotFound(
                f"{self._store.locate(key)}: has just been removed with its dead letter"
            ) from error

    def replay(self, letter: str, send: Send | None = None, *, again: bool = False) -> str:
        """Send the dead letter's original to its ingest source again, and record the replay; returns the outcome as
        text.

        A crash between the two leaves a dead letter that was sent without a record: another replay sends it twice,
        which every ingest source deduplicates.

        Args:
            send: not needed where only a marker keeps the ingest source from retrying.
            again: replay also a dead letter that was replayed before.

        Raises:
            DeadLetterNotFound: there is none.  CannotReplay: see there.  PipelineError: `send` failed.
        """
        found = self.find(letter)
        dead = found.dead_letter
        where = self._store.locate(_dead_letter_key(dead.id))
        if found.replays and not again:
            raise CannotReplay(f"{where}: was replayed before; --again sends it once more")
        if dead.stored < dead.size:
            raise CannotReplay(f"{where}: only {dead.stored} of {dead.size} bytes were stored; send it from its source")
        if send is not None:
            outcome = send(dead, self.original(dead))
        elif dead.marker is not None:
            outcome = f"{dead.place} is tried again by its ingest source"
        else:
            raise CannotReplay(
                f"{where}: came from the ingest source '{dead.ingest_source}', which can't be reached from here"
            )
        number = found.replays + 1
        record = Replay(at=self._world.clock.now(), outcome=outcome).to_json()
        while not self._store.create(f"{LETTERS}{dead.id}.replay-{number:04d}.json", record):
            number += 1
        # Last: a reader that finds the marker deleted must find the replay.
        if dead.marker is not None:
            self._store.delete(dead.marker)
        return outcome

    def replays(self, letter: str) -> list[Replay]:
        """The replays of the dead letter, the earliest first."""
        return [parse_stored(self._store.locate(key), self._store.read(key), Replay) for key in self._replays(letter)]

    def _replays(self, letter: str) -> list[str]:
        return [info.key for info in self._store.list(f"{LETTERS}{letter}.replay-")]

    def _read(self, letter: str) -> DeadLetter:
        key = _dead_letter_key(letter)
        try:
            data = self._store.read(key)
        except ObjectNotFound as error:
            where = self._store.locate(LETTERS.rstrip("/"))
            raise DeadLetterNotFound(f"{where}: no dead letter {letter}; 'deadletters list' shows all") from error
        return parse_stored(self._store.locate(key), data, DeadLetter)


def _dead_letter_key(letter: str) -> str:
    return f"{LETTERS}{letter}.json"


def _original_key(letter: str) -> str:
    return f"{LETTERS}{letter}.original"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
