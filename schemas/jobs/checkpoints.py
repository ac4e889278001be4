"""Checkpoints of an attempt on a shard. Logged rows and tokens are never computed again.

One object holds two Arrow IPC streams behind a header: finished rows, as results, and running choices, as token ids.
Each checkpoint holds only the difference from the attempt's previous one.

    magic (8 bytes) | sha256 of all that follows (32) | length of the head (4, big-endian) | head | finished | running
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from schemas.jobs.arrow_schemas import RESULT_FIELDS
from schemas.jobs.outcome import Usage, WorkerTime
from schemas.jobs.results import ResultRow, results_table
from schemas.stored import Count, StoredModel

MAGIC = b"tmckpt01"
_SHA = 32
_LENGTH = 4
_HEADER = len(MAGIC) + _SHA + _LENGTH

ROW_USAGE = ("prompt", "cached", "completion", "drafted", "accepted")
"""The fields of `Usage` that a row can have."""

USAGE_FIELDS = tuple(pa.field(f"usage_{name}", pa.int64(), nullable=False) for name in ROW_USAGE)
FINISHED_SCHEMA = pa.schema([*RESULT_FIELDS, *USAGE_FIELDS])
"""Results, with the tokens that the row cost (0 for copies)."""

RUNNING_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("choice", pa.int32(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),  # index in the answer of the first of `token_ids`
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_token_id", pa.int32()),
        pa.field("logprobs", pa.list_(pa.float32())),  # of each token, when the request asks for them
        pa.field("top_ids", pa.list_(pa.int32())),  # the most likely ones, token after token
        pa.field("top", pa.list_(pa.float32())),
        pa.field("tries", pa.string()),  # of a row that was asked before, as JSON; with its first piece
    ]
)


class DamagedCheckpoint(ValueError):
    """Raised when bytes are no whole checkpoint. Its rows are computed again."""


class CheckpointHead(StoredModel):
    """The header of a checkpoint.

    Attributes:
        sequence: index of the checkpoint in its attempt, from 0.
        final: the attempt released the shard; it did not die.
        generated: tokens that the attempt has sampled so far; cumulative, since earlier checkpoints may be gone.
        exposed: tokens that its engine sampled since the previous one, for all shards: the most that a crash can lose.
        worked: the attempt's worker time so far.
    """

    version: Literal[1] = 1
    job: str
    shard: Count
    attempt_id: str
    sequence: Count
    final: bool = False
    generated: Count = 0
    exposed: Count = 0
    worked: WorkerTime = WorkerTime()


@dataclass(frozen=True, slots=True)
class LoggedLogprobs:
    """Log-probabilities along logged tokens: `chosen` float32 [tokens], the most likely `top_ids` int32 [tokens, k] and
    `top` float32 [tokens, k]."""

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FormerTry:
    """A try of a row whose answer was not accepted.

    Attributes:
        text: the answer.  error: why it was not accepted, as the model is told.
        usage: the tokens of this try.
    """

    text: str
    error: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """A choice of a row that has not finished.

    Attributes:
        start: index in the answer of the first of `token_ids`.
        token_ids: int32 [tokens], without an end token.
        finish_reason, stop_token_id: how it ended, while other choices of the row still run.
        logprobs: along the tokens, when the request asks for them.
        tries: the row's tries before this one; with the piece that starts at 0.
    """

    row: int
    choice: int
    start: int
    token_ids: NDArray[np.int32]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprobs: LoggedLogprobs | None = None
    tries: tuple[FormerTry, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Results of rows that have finished; `usages[i]` are the tokens of `rows[i]` (0 for a copy)."""

    rows: Sequence[ResultRow]
    usages: Sequence[Usage]

    def table(self) -> pa.Table:
        """The rows in `FINISHED_SCHEMA`."""
        table = results_table(self.rows)
        for field, name in zip(USAGE_FIELDS, ROW_USAGE, strict=True):
            table = table.append_column(field, pa.array([getattr(u, name) for u in self.usages], field.type))
        return table


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint, read back; `finished` is in `FINISHED_SCHEMA`."""

    head: CheckpointHead
    finished: pa.Table
    running: tuple[LoggedChoice, ...]


def encode(head: CheckpointHead, finished: FinishedRows, running: Iterable[LoggedChoice]) -> bytes:
    """The object's bytes."""
    head_bytes = head.model_dump_json(exclude_none=True).encode()
    body = pa.BufferOutputStream()
    body.write(len(head_bytes).to_bytes(_LENGTH, "big"))
    body.write(head_bytes)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    for table in (finished.table(), _running_table(list(running))):
        with pa.ipc.new_stream(body, table.schema, options=options) as writer:
            writer.write_table(table)
    data = body.getvalue().to_pybytes()
    return b"".join((MAGIC, hashlib.sha256(data).digest(), data))


def decode(data: bytes) -> Checkpoint:
    """A checkpoint from its bytes; raises `DamagedCheckpoint`."""
    if len(data) < _HEADER or not data.startswith(MAGIC):
        raise DamagedCheckpoint("does not begin as a checkpoint of this version does")
    if hashlib.sha256(data[len(MAGIC) + _SHA :]).digest() != data[len(MAGIC) : len(MAGIC) + _SHA]:
        raise DamagedCheckpoint("its bytes are not those that were written")
    length = int.from_bytes(data[_HEADER - _LENGTH : _HEADER], "big")
    try:
        head = CheckpointHead.model_validate_json(data[_HEADER : _HEADER + length])
        stream = pa.BufferReader(memoryview(data)[_HEADER + length :])
        finished = _with_new_columns(pa.ipc.open_stream(stream).read_all(), FINISHED_SCHEMA)
        running = _with_new_columns(pa.ipc.open_stream(stream).read_all(), RUNNING_SCHEMA)
    except (ValidationError, pa.ArrowInvalid, OSError) as error:
        raise DamagedCheckpoint(str(error).splitlines()[0]) from error
    if finished.schema != FINISHED_SCHEMA or running.schema != RUNNING_SCHEMA:
        raise DamagedCheckpoint("has other columns than this version's")
    return Checkpoint(head, finished, tuple(_choice(line) for line in running.to_pylist()))


def _with_new_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table of a former version, with nulls in the columns that were added since; those are nullable."""
    for at, field in enumerate(schema):
        if field.nullable and field.name not in table.column_names and at <= table.num_columns:
            table = table.add_column(at, field, pa.nulls(table.num_rows, field.type))
    return table


def join(pieces: Sequence[LoggedChoice]) -> LoggedChoice | None:
    """Join one attempt's pieces of one choice (in order), from the first token to the first gap; None if the first
    piece is missing. A piece that starts at 0 again is a new try and replaces the pieces before it."""
    whole: list[LoggedChoice] = []
    known = 0
    for piece in pieces:
        if piece.start == 0:
            whole, known = [], 0
        if piece.start != known:
            break
        known += len(piece.token_ids)
        whole.append(piece)
    if not whole:
        return None
    logprobs = [piece.logprobs for piece in whole if piece.logprobs is not None and len(piece.token_ids)]
    return LoggedChoice(
        row=whole[0].row,
        choice=whole[0].choice,
        start=0,
        token_ids=np.concatenate([piece.token_ids for piece in whole]),
        finish_reason=whole[-1].finish_reason,
        stop_token_id=whole[-1].stop_token_id,
        logprobs=_joined(logprobs) if logprobs else None,
        tries=whole[0].tries,
    )


def _joined(pieces: Sequence[LoggedLogprobs]) -> LoggedLogprobs:
    return LoggedLogprobs(
        np.concatenate([piece.chosen for piece in pieces]),
        np.concatenate([piece.top_ids for piece in pieces]),
        np.concatenate([piece.top for piece in pieces]),
    )


def _running_table(choices: list[LoggedChoice]) -> pa.Table:
    given = [choice.logprobs for choice in choices]
    columns = {
        "row": [choice.row for choice in choices],
        "choice": [choice.choice for choice in choices],
        "start": [choice.start for choice in choices],
        "token_ids": [choice.token_ids for choice in choices],
        "finish_reason": [choice.finish_reason for choice in choices],
        "stop_token_id": [choice.stop_token_id for choice in choices],
        "logprobs": [None if logprobs is None else logprobs.chosen for logprobs in given],
        "top_ids": [None if logprobs is None else logprobs.top_ids.reshape(-1) for logprobs in given],
        "top": [None if logprobs is None else logprobs.top.reshape(-1) for logprobs in given],
        "tries": [_tries_as_json(choice.tries) for choice in choices],
    }
    return pa.table(columns, schema=RUNNING_SCHEMA)


def _choice(line: dict[str, Any]) -> LoggedChoice:
    logprobs = None
    if line["logprobs"] is not None:
        count = len(line["logprobs"])
        width = len(line["top"]) // count if count else 0
        logprobs = LoggedLogprobs(
            np.array(line["logprobs"], dtype=np.float32),
            np.array(line["top_ids"], dtype=np.int32).reshape(count, width),
            np.array(line["top"], dtype=np.float32).reshape(count, width),
        )
    return LoggedChoice(
        row=line["row"],
        choice=line["choice"],
        start=line["start"],
        token_ids=np.array(line["token_ids"], dtype=np.int32),
        finish_reason=line["finish_reason"],
        stop_token_id=line["stop_token_id"],
        logprobs=logprobs,
        tries=_tries_of_json(line["tries"]),
    )


def _tries_as_json(tries: Sequence[FormerTry]) -> str | None:
    if not tries:
        return None
    values = [{"text": one.text, "error": one.error, "usage": one.usage.model_dump()} for one in tries]
    return orjson.dumps(values).decode()


def _tries_of_json(data: str | None) -> tuple[FormerTry, ...]:
    values = [] if data is None else orjson.loads(data)
    return tuple(FormerTry(one["text"], one["error"], Usage.model_validate(one["usage"])) for one in values)
