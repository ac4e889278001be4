"""The history of a shard: the checkpoints, notes and records of its attempts. The next attempt resumes from their
union, and a closed job takes its finished rows from it.

Any attempt may have died between two writes, and a slow one may still be writing. So each attempt's objects are read by
themselves, and a row counts as finished if any attempt finished it. For a row that no attempt finished, the most tries
count, and of equally many the longest partial answer; tries and answers of different attempts are never mixed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import structlog

from pipeline.ledger.ledger import JobLedger, work_key
from pipeline.ledger.records import AttemptRecord, NoteRecord
from pipeline.ports import ObjectNotFound
from schemas.jobs.checkpoints import FINISHED_SCHEMA, Checkpoint, DamagedCheckpoint, LoggedChoice, decode, join
from schemas.jobs.outcome import WorkerTime

_CHECKPOINT = re.compile(r"([0-9a-f]{16})-(\d{6,})")
_NOTE = re.compile(r"note-([0-9a-f]{16})-(\d{6,})\.json")
_ATTEMPT = re.compile(r"attempt-(\d{4,})\.json")

logger = structlog.get_logger(__name__)


def checkpoint_key(shard: int, attempt_id: str, sequence: int) -> str:
    """Key of a checkpoint, relative to the job."""
    return work_key(shard, f"{attempt_id}-{sequence:06d}")


def note_key(shard: int, attempt_id: str, sequence: int) -> str:
    """Key of a note that an attempt computes only certain rows, relative to the job."""
    return work_key(shard, f"note-{attempt_id}-{sequence:06d}.json")


@dataclass(frozen=True, slots=True)
class ShardHistory:
    """The state that earlier attempts on a shard have recorded.

    Attributes:
        finished: `FINISHED_SCHEMA`, each row at most once.
        running: row -> its choices, for rows that no attempt finished; each choice from its first token.
        logged: attempt id -> logged number of sampled tokens.
        exposed: attempt id -> maximum tokens that its engine sampled between two checkpoints.
        worked: attempt id -> logged worker time.
        attempts: records of all attempts, in order.
        silent: number of latest attempts in a row that died without progress.
        isolated_rows: the only rows that were being computed when the latest attempt died.
        blamed: rows that were the only one being computed when an attempt died -> how often.
        keys: keys of the checkpoints, by attempt id.
    """

    finished: pa.Table = field(default_factory=FINISHED_SCHEMA.empty_table)
    running: Mapping[int, tuple[LoggedChoice, ...]] = field(default_factory=dict)
    logged: Mapping[str, int] = field(default_factory=dict)
    exposed: Mapping[str, int] = field(default_factory=dict)
    worked: Mapping[str, WorkerTime] = field(default_factory=dict)
    attempts: tuple[AttemptRecord, ...] = ()
    silent: int = 0
    isolated_rows: frozenset[int] = frozenset()
    blamed: Mapping[int, int] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def finished_rows(self) -> frozenset[int]:
        return frozenset(self.finished["row"].to_pylist())


def read_history(ledger: JobLedger, shard: int) -> ShardHistory:
    """Read the history of a shard. Checkpoints that vanish or are damaged are skipped, the latter with a warning."""
    names = _WorkKeys.of(ledger, shard)
    by_attempt: dict[str, list[Checkpoint]] = {}
    for attempt_id, keys in names.checkpoints.items():
        found = [checkpoint for key in keys if (checkpoint := _read(ledger, key)) is not None]
        by_attempt[attempt_id] = sorted(found, key=lambda checkpoint: checkpoint.head.sequence)
    attempts = tuple(ledger.attempts(shard))
    ended = {record.attempt_id for record in ledger.ended(shard)}
    finished = _finished(by_attempt.values())
    done = frozenset(finished["row"].to_pylist())
    isolated = {
        name: _isolated_rows(ledger, notes, by_attempt.get(name, []))
        for name, notes in names.notes.items()
        if name not in ended
    }
    cornered = isolated.get(attempts[-1].attempt_id, frozenset()) if attempts else frozenset()
    return ShardHistory(
        finished=finished,
        running=_running(by_attempt.values(), done),
        logged={name: max((p.head.generated for p in found), default=0) for name, found in by_attempt.items()},
        exposed={name: max((p.head.exposed for p in found), default=0) for name, found in by_attempt.items()},
        worked={name: found[-1].head.worked for name, found in by_attempt.items() if found},
        attempts=attempts,
        silent=_count_silent(attempts, by_attempt.keys() | ended),
        isolated_rows=cornered,
        blamed=Counter(row for rows in isolated.values() if len(rows) == 1 for row in rows),
        keys={name: tuple(keys) for name, keys in names.checkpoints.items()},
    )


def read_worked(ledger: JobLedger, shard: int) -> dict[str, WorkerTime]:
    """Logged worker time of the attempts on a shard, by attempt id: from the end record of those that ended in order,
    else from the newest readable checkpoint. Reads one checkpoint for each of the latter."""
    worked = {record.attempt_id: record.worked for record in ledger.ended(shard)}
    for attempt_id, keys in _WorkKeys.of(ledger, shard).checkpoints.items():
        if attempt_id not in worked:
            readable = filter(None, (_read(ledger, key) for key in sorted(keys, reverse=True)))
            if (newest := next(readable, None)) is not None:
                worked[attempt_id] = newest.head.worked
    return worked


@dataclass(slots=True)
class _WorkKeys:
    """Keys of checkpoints and notes in a shard's work folder, by attempt id; relative to the job."""

    checkpoints: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, ledger: JobLedger, shard: int) -> _WorkKeys:
        names = cls()
        for info in ledger.store.list(ledger.prefix + work_key(shard, "")):
            key = info.key.removeprefix(ledger.prefix)
            name = key.rsplit("/", 1)[-1]
            if match := _CHECKPOINT.fullmatch(name):
                names.checkpoints.setdefault(match[1], []).append(key)
            elif match := _NOTE.fullmatch(name):
                names.notes.setdefault(match[1], []).append(key)
        return names


def _read(ledger: JobLedger, key: str) -> Checkpoint | None:
    try:
        return decode(ledger.store.read(ledger.prefix + key))
    except ObjectNotFound:  # its attempt has just committed, and deletes its checkpoints
        return None
    except DamagedCheckpoint as error:
        logger.warning("a checkpoint is damaged: its rows are computed again", at=ledger.location(key), why=str(error))
        return None


def _finished(logs: Iterable[list[Checkpoint]]) -> pa.Table:
    tables = [point.finished for log in logs for point in log if len(point.finished)]
    if not tables:
        return FINISHED_SCHEMA.empty_table()
    table = pa.concat_tables(tables)
    _, firsts = np.unique(table["row"].to_numpy(), return_index=True)
    return table.take(pa.array(firsts)).combine_chunks()


def _running(logs: Iterable[list[Checkpoint]], done: frozenset[int]) -> dict[int, tuple[LoggedChoice, ...]]:
    """For each unfinished row, the choices of the attempt that got furthest."""
    best: dict[int, tuple[LoggedChoice, ...]] = {}
    for log in logs:
        pieces: defaultdict[tuple[int, int], list[LoggedChoice]] = defaultdict(list)
        for point in log:
            for choice in point.running:
                if choice.row not in done:
                    pieces[choice.row, choice.choice].append(choice)
        rows: defaultdict[int, list[LoggedChoice]] = defaultdict(list)
        for (row, _), parts in pieces.items():
            joined = join(parts)
            if joined is not None:
                rows[row].append(joined)
        for row, choices in rows.items():
            if _progress(choices) > _progress(best.get(row, ())):
                best[row] = tuple(sorted(choices, key=lambda choice: choice.choice))
    return best


def _progress(choices: Collection[LoggedChoice]) -> tuple[int, int]:
    """The row's former tries, and the tokens of the last one."""
    return max((len(choice.tries) for choice in choices), default=0), sum(len(choice.token_ids) for choice in choices)


def _count_silent(attempts: tuple[AttemptRecord, ...], reported: Set[str]) -> int:
    """The number of latest attempts with neither a checkpoint nor an end record. A checkpoint proves progress: none is
    written without a new token or a finished row, and none in an attempt's first second."""
    last = max((number for number, record in enumerate(attempts, 1) if record.attempt_id in reported), default=0)
    return len(attempts) - last


def _isolated_rows(ledger: JobLedger, notes: list[str], log: list[Checkpoint]) -> frozenset[int]:
    """The rows in an attempt's last note, the only ones that it computed then; none if it wrote a checkpoint later."""
    last = max(notes)
    match = _NOTE.fullmatch(last.rsplit("/", 1)[-1])
    if match is None or (log and log[-1].head.sequence > int(match[2])):
        return frozenset()
    record = ledger.read_record(last, NoteRecord)
    return frozenset() if record is None else frozenset(record.rows)
