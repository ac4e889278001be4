"""The binary form of the leader's messages: an int64 that names the kind, then the fields.

Commands of a step are numbers in a fixed order: int64 first, then the int32 arrays whose sizes the first numbers give.
So no object is made by name from what arrives, and a message whose length contradicts its own numbers is refused. The
few commands that set a rank up are pickled: they come from the process that started this one.
"""

from __future__ import annotations

import pickle
from enum import IntEnum
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.attention import AttentionBatch
from engine.errors import EngineError
from engine.parallel.messages import CopyBlocks, Forward, Logits, Message, ZeroBlocks
from engine.plan import BlockCopy

Number = TypeVar("Number", np.int32, np.int64)

_ITEM_BYTES: dict[type[np.integer[Any]], int] = {np.int32: 4, np.int64: 8}

_NONE = -1
"""Stands for None, where numbers are 0 or more."""


class _Kind(IntEnum):
    SET_UP = 0
    FORWARD = 1
    LOGITS = 2
    ZERO_BLOCKS = 3
    COPY_BLOCKS = 4


def encode(message: Message) -> bytes:
    """Return the message's bytes."""
    match message:
        case Forward():
            return _encode_forward(message)
        case Logits():
            return _numbers(_Kind.LOGITS, message.rows)
        case ZeroBlocks():
            return _numbers(_Kind.ZERO_BLOCKS, message.group, *message.blocks)
        case CopyBlocks():
            return _numbers(_Kind.COPY_BLOCKS, message.group, *(number for copy in message.copies for number in copy))
        case _:
            return _numbers(_Kind.SET_UP) + pickle.dumps(message)


def decode(data: bytes) -> Message:
    """Return the message with these bytes. Its arrays belong to the caller.

    Raises:
        EngineError: it is none, or its sizes contradict each other.
    """
    fields = _Fields(data)
    match fields.number():
        case _Kind.SET_UP:
            message: Message = pickle.loads(fields.rest())  # noqa: S301 - from the process that started this one
            return message
        case _Kind.FORWARD:
            return _decode_forward(fields)
        case _Kind.LOGITS:
            rows = fields.number()
            fields.end()
            if rows < 1:
                raise EngineError(f"a command of the leader is damaged: it asks for logits of {rows} rows")
            return Logits(rows)
        case _Kind.ZERO_BLOCKS:
            return ZeroBlocks(fields.number(), fields.take(np.int64, fields.left // 8).tolist())
        case _Kind.COPY_BLOCKS:
            group, width = fields.number(), len(BlockCopy._fields)
            copies = fields.take(np.int64, fields.left // (8 * width), width).tolist()
            fields.end()
            return CopyBlocks(group, [BlockCopy(*copy) for copy in copies])
        case kind:
            raise EngineError(f"a command of the leader is damaged: it is of kind {kind}")


def _encode_forward(message: Forward) -> bytes:
    batch = message.batch
    width = batch.block_tables[0].shape[1]
    assert all(table.shape[1] == width for table in batch.block_tables), "tables of a step are equally wide"
    wanted, graph = batch.wanted, message.graph
    header = _numbers(
        _Kind.FORWARD, message.lengths, _NONE if graph is None else graph, len(batch.starts),
        len(batch.slot_mapping[0]), batch.num_decodes, len(batch.block_tables), width,
        _NONE if wanted is None else len(wanted), len(message.ends), message.adapters is not None,
    )  # fmt: skip
    arrays: list[NDArray[Any]] = [*batch.slot_mapping, batch.starts, batch.counts, *batch.block_tables, message.ends]
    if wanted is not None:
        arrays.append(wanted)
    if message.adapters is not None:
        arrays.append(message.adapters)
    return b"".join((header, *(array.tobytes() for array in arrays)))


def _decode_forward(fields: _Fields) -> Forward:
    sizes = fields.take(np.int64, 10).tolist()
    lengths, graph, sequences, tokens, num_decodes, groups, width, num_wanted, parts, adapted = sizes
    if {lengths, adapted} - {0, 1} or graph < _NONE or min(tokens, groups) < 1 or not 0 <= num_decodes <= sequences:
        raise EngineError(
            f"a command of the leader is damaged: a step of {tokens} tokens, {num_decodes} of {sequences} sequences "
            f"decoding, in {groups} cache groups, by graph {graph}"
        )
    slots = tuple(fields.take(np.int64, tokens) for _ in range(groups))
    starts, counts = fields.take(np.int32, sequences), fields.take(np.int32, sequences)
    tables = tuple(fields.take(np.int32, sequences, width) for _ in range(groups))
    ends = fields.take(np.int32, parts)
    wanted = None if num_wanted == _NONE else fields.take(np.int32, num_wanted)
    adapters = fields.take(np.int32, tokens) if adapted else None
    fields.end()
    if (found := int(counts.sum())) != tokens:
        raise EngineError(f"a command of the leader is damaged: a step of {tokens} tokens has sequences of {found}")
    if not parts or ends[-1] != sequences or (np.diff(ends, prepend=np.int32(0)) < 1).any():
        raise EngineError(
            f"a command of the leader is damaged: micro-batches of {sequences} sequences end at {ends.tolist()}"
        )
    batch = AttentionBatch(starts, counts, num_decodes, tables, slots, wanted)
    return Forward(batch, bool(lengths), ends, None if graph == _NONE else graph, adapters)


def _numbers(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int64).tobytes()


class _Fields:
    """Reads a message's fields in turn. Raises `EngineError` where it ends too soon, or too late."""

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)  # which arrays may share: torch takes only arrays that can be written to
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self._data) - self._at

    def number(self) -> int:
        """Read an int64."""
        return int(self.take(np.int64, 1)[0])

    def take(self, dtype: type[Number], *shape: int) -> NDArray[Number]:
        """Read an array of this shape."""
        count, itemsize = prod(shape), _ITEM_BYTES[dtype]
        if min(shape) < 0 or count * itemsize > self.left:
            raise EngineError(
                f"a command of the leader is damaged: {self.left} of {len(self._data)} bytes are left, and an array of "
                f"{list(shape)} elements of {itemsize} bytes is next"
            )
        found: NDArray[Number] = np.ndarray(shape, dtype, self._data, self._at)
        self._at += count * itemsize
        return found

    def rest(self) -> bytes:
        """Read all that is left."""
        return bytes(self._data[self._at :])

    def end(self) -> None:
        """Check that nothing is left."""
        if self.left:
            raise EngineError(f"a command of the leader is damaged: {self.left} bytes are left behind its last field")
