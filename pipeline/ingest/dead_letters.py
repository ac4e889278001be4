"""What could not become a request: the original, why, and from where, so that nothing is lost in silence.

A letter's id is made of its source. So a door that dies between writing a letter and acknowledging what it read writes
the same letter again, and finds it. The original is stored first and the letter last: a letter that is seen is whole.

To replay a letter is to send its original through its door again. What lies in a bucket or folder needs no sending: the
marker that keeps its door from trying again is removed, and the door finds it. If it is refused once more, that is a
letter of its own (`open_source`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal

from pydantic import AwareDatetime

from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import parse_stored
from pipeline.ports import ObjectInfo, ObjectNotFound, ObjectStore, PipelineError, World
from schemas.stored import Count, StoredModel

LETTERS: Final = "deadletters/"
BUCKET_EVENTS: Final = "bucket-events"
"""The door of messages that should tell of uploads."""
MOST_BYTES: Final = 16 << 20
"""Of an original that are kept; more than the longest line that is read."""
LONGEST_MESSAGE: Final = 2_000
"""Characters of a reason that are kept."""

Headers = Sequence[tuple[str, bytes | None]]
"""In order; a name may come more than once."""


class DeadLetterNotFound(PipelineError):
    """Raised when there is no dead letter of the id."""


class CannotReplay(PipelineError):
    """Raised when a letter can't be sent again: it was already, or its original is not whole."""


@dataclass(frozen=True, slots=True)
class DeadLetterSource:
    """Where something came from: the same in every delivery of it.

    Attributes:
        door: who can send it again, such as "kafka", "bucket", "folder".
        place: a topic with its cluster, an object's URI, a queue.
        position: what sets it apart in its place: partition and offset, an object's version, a message's id.
        at: when it came to be there, by the source's own clock: the newest letters are listed first.
    """

    door: str
    place: str
    position: str
    at: datetime


class DeadLetter(StoredModel):
    """`deadletters/ID.json`. Its original lies beside it, unless it is empty or still where it came from.

    Attributes:
        reason_code, message: why it could not become a request.
        key, headers: of a record, in base64.
        size: of the original.  stored: bytes of it that were kept, from its beginning.
        marker: key of the object that keeps its door from trying again.
    """

    version: Literal[1] = 1
    id: str
    door: str
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
        """The record's key as it came."""
        return None if self.key is None else base64.b64decode(self.key)

    def record_headers(self) -> list[tuple[str, bytes | None]]:
        """The headers as they came."""
        return [(name, None if value is None else base64.b64decode(value)) for name, value in self.headers]


class Replay(StoredModel):
    """`deadletters/ID.replay-NNNN.json`: the letter was sent again."""

    version: Literal[1] = 1
    at: AwareDatetime
    outcome: str


@dataclass(frozen=True, slots=True)
class DeadLetterEntry:
    """A letter, and how often it was sent again."""

    letter: DeadLetter
    replays: int


Send = Callable[[DeadLetter, bytes], str]
"""Sends a letter's original through its door again; returns, for people, what became of it. Raises `PipelineError`."""


def letter_id(source: DeadLetterSource) -> str:
    """The id of what comes from this source: the newest sort first."""
    made = derived_job_id(source.at, "dead letter", source.door, source.place, source.position)
    return f"dl-{made.removeprefix('job-')}"


def letter_objects(store: ObjectStore, letter: str) -> list[ObjectInfo]:
    """All objects of the letter of this id, and itself the last: as long as it stands the others can be found."""
    return sorted(store.list(f"{LETTERS}{letter}."), key=lambda info: info.key == _letter_key(letter))


class DeadLetters:
    """The dead letters of a root. Holds no state, so many may write and read.

    Args:
        most_bytes: of an original that are kept. One that is longer can be looked at, but not replayed.
    """

    def __init__(self, world: World, most_bytes: int = MOST_BYTES) -> None:
        self._world = world
        self._store = world.store
        self._most_bytes = most_bytes

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
        """Write the letter durably, once; its id. When this returns, the source may forget what it sent.

        Args:
            original: empty when it stays where it is, as what lies in a bucket does.
            key: of a record.  marker: see `DeadLetter`.
        """
        made = letter_id(source)
        kept = original[: self._most_bytes]
        letter = DeadLetter(
            id=made,
            door=source.door,
            place=source.place,
            position=source.position,
            at=source.at,
            recorded_at=self._world.clock.now(),
            reason_code=reason_code,
            message=message[:LONGEST_MESSAGE],
            key=None if key is None else _text(key),
            headers=tuple((name, None if value is None else _text(value)) for name, value in headers),
            size=len(original),
            stored=len(kept),
            marker=marker,
        )
        if kept:
            self._store.create(_original_key(made), kept)
        if self._store.create(_letter_key(made), letter.to_json()):
            self._world.letters.note(source.door)
        return made

    def open_source(self, source: DeadLetterSource) -> DeadLetterSource | None:
        """Under which source a refusal would be written now. None: it was refused, and nobody asked for another try."""
        attempt, times = source, 0
        while self._store.info(_letter_key(letter_id(attempt))) is not None:
            if not self._replays(letter_id(attempt)):
                return None
            times += 1
            attempt = replace(source, position=f"{source.position} again {times}")
        return attempt

    def letters(self) -> Iterator[DeadLetterEntry]:
        """All letters, the newest first."""
        letter, replays = None, 0
        for info in self._store.list(LETTERS):
            name, _, what = info.key.removeprefix(LETTERS).partition(".")
            if what == "json":
                if letter is not None:
                    yield DeadLetterEntry(letter, replays)
                letter, replays = self._read(name), 0
            elif letter is not None and letter.id == name:
                replays += what.startswith("replay-")
        if letter is not None:
            yield DeadLetterEntry(letter, replays)

    def find(self, letter: str) -> DeadLetterEntry:
        """The letter of this id. Raises `DeadLetterNotFound`."""
        return DeadLetterEntry(self._read(letter), len(self._replays(letter)))

    def original(self, letter: DeadLetter) -> bytes:
        """What was kept of the original. Raises `DeadLetterNotFound` where it is gone: the letter is being removed."""
        if not letter.stored:
            return b""
        key = _original_key(letter.id)
        try:
            return self._store.read(key)
        except ObjectNotFound as error:
            raise DeadLetterNotFound(f"{self._store.locate(key)}: has just been removed, as its letter is") from error

    def replay(self, letter: str, send: Send | None = None, *, again: bool = False) -> str:
        """Send the letter's original through its door again, and mark the letter; what became of it, for people.

        A death between the two leaves a letter that was sent and is not marked: to replay it once more sends it twice,
        which every door takes for one.

        Args:
            send: not needed where a marker is all that keeps the door from trying again.
            again: also a letter that was replayed before.

        Raises:
            NoSuchLetter: there is none.  CannotReplay: see there.  PipelineError: `send` failed.
        """
        found = self.find(letter)
        dead = found.letter
        where = self._store.locate(_letter_key(dead.id))
        if found.replays and not again:
            raise CannotReplay(f"{where}: was replayed before; --again sends it once more")
        if dead.stored < dead.size:
            raise CannotReplay(f"{where}: only {dead.stored} of {dead.size} bytes were kept; send it from its source")
        if send is not None:
            outcome = send(dead, self.original(dead))
        elif dead.marker is not None:
            outcome = f"{dead.place} is tried again by its door"
        else:
            raise CannotReplay(f"{where}: came through the door '{dead.door}', which can't be reached from here")
        number = found.replays + 1
        record = Replay(at=self._world.clock.now(), outcome=outcome).to_json()
        while not self._store.create(f"{LETTERS}{dead.id}.replay-{number:04d}.json", record):
            number += 1
        # Last: who finds the marker gone must find the replay.
        if dead.marker is not None:
            self._store.delete(dead.marker)
        return outcome

    def replays(self, letter: str) -> list[Replay]:
        """When the letter was sent again, the earliest first."""
        return [parse_stored(self._store.locate(key), self._store.read(key), Replay) for key in self._replays(letter)]

    def _replays(self, letter: str) -> list[str]:
        return [info.key for info in self._store.list(f"{LETTERS}{letter}.replay-")]

    def _read(self, letter: str) -> DeadLetter:
        key = _letter_key(letter)
        try:
            data = self._store.read(key)
        except ObjectNotFound as error:
            where = self._store.locate(LETTERS.rstrip("/"))
            raise DeadLetterNotFound(f"{where}: no dead letter {letter}; 'deadletters list' shows all") from error
        return parse_stored(self._store.locate(key), data, DeadLetter)


def _letter_key(letter: str) -> str:
    return f"{LETTERS}{letter}.json"


def _original_key(letter: str) -> str:
    return f"{LETTERS}{letter}.original"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
