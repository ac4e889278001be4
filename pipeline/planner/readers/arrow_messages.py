"""The sizes that Arrow's messages decode to, found before anything is decoded.

A record batch is decoded as a whole, and its compressed buffers declare their decoded sizes themselves: a file of some
bytes can ask for any memory. pyarrow doesn't expose these sizes, so they are read here from the messages' metadata,
which is FlatBuffers (Arrow columnar format, "Serialization and Interprocess Communication"; Message.fbs, File.fbs).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from pipeline.planner.ports import BrokenInput
from pipeline.planner.readers.expansion import ExpansionLimit

MAX_BATCH_BYTES: Final = 512 << 20
"""Maximum bytes of a record batch, decoded, together with the dictionaries."""

DICTIONARY_BATCH: Final = 2
RECORD_BATCH: Final = 3

_STORED: Final = -1
"""The declared size of a buffer that is not compressed, in a batch whose buffers are."""


class ArrowMessage(NamedTuple):
    """The fields of a message's metadata that sizes depend on.

    Attributes:
        kind: of Message.fbs's MessageHeader.  body_bytes: that follow the metadata.
        dictionary: the id of a dictionary batch.  is_delta: whether it adds to the dictionary of that id.
    """

    kind: int
    body_bytes: int
    batch: FlatTable | None
    dictionary: int
    is_delta: bool


class ArrowBlock(NamedTuple):
    """The location of a message in a file: its offset, and the bytes of its metadata, with their length, and body."""

    offset: int
    metadata_bytes: int
    body_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.metadata_bytes + self.body_bytes


class FlatTable:
    """A FlatBuffers table. Reading outside of its bytes raises `struct.error` or `ValueError`."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._vtable = at - _unpack("<i", data, at)
        self._vtable_bytes = _unpack("<H", data, self._vtable)

    def number(self, field: int, kind: str) -> int:
        """A scalar field, by its number and `struct` format; 0 when it is absent."""
        at = self._field(field)
        return 0 if at is None else _unpack(kind, self._data, at)

    def table(self, field: int) -> FlatTable | None:
        at = self._field(field)
        return None if at is None else FlatTable(self._data, at + _unpack("<I", self._data, at))

    def structs(self, field: int, kind: str) -> Iterator[tuple[int, ...]]:
        """A vector of structs, each as its numbers."""
        at = self._field(field)
        if at is None:
            return
        at += _unpack("<I", self._data, at)
        size = struct.calcsize(kind)
        count = _unpack("<I", self._data, at)
        if at + 4 + count * size > len(self._data):
            raise ValueError("a list is longer than the metadata that hold it")
        for index in range(count):
            yield struct.unpack_from(kind, self._data, at + 4 + index * size)

    def _field(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._vtable_bytes:
            return None
        offset = _unpack("<H", self._data, self._vtable + slot)
        return self._at + offset if offset else None


def parse_message(metadata: bytes) -> ArrowMessage:
    """Parse a message's metadata, without the length before it. Raises `struct.error`, `ValueError`."""
    data = memoryview(metadata)
    message = _root(data)
    kind, header = message.number(1, "<B"), message.table(2)
    body_bytes = message.number(3, "<q")
    if kind == DICTIONARY_BATCH and header is not None:
        return ArrowMessage(kind, body_bytes, header.table(1), header.number(0, "<q"), bool(header.number(2, "<B")))
    return ArrowMessage(kind, body_bytes, header if kind == RECORD_BATCH else None, 0, False)


def parse_footer(footer: bytes) -> tuple[list[ArrowBlock], list[ArrowBlock]]:
    """The dictionaries and the record batches of a file. Raises `struct.error`, and `ValueError` if any overlap: a few
    bytes in the footer would have the same block decoded again."""
    table = _root(memoryview(footer))
    dictionaries, batches = ([ArrowBlock(*numbers) for numbers in table.structs(field, "<qi4xq")] for field in (2, 3))
    end = 0
    for block in sorted(dictionaries + batches):
        if block.offset < end or min(block.metadata_bytes, block.body_bytes) < 0:
            raise ValueError(f"the block at byte {block.offset} overlaps another")
        end = block.end
    return dictionaries, batches


def decoded_bytes(batch: FlatTable, body: bytes) -> int:
    """The bytes that a batch's buffers declare. Raises `struct.error`, `ValueError`."""
    if batch.table(3) is None:  # no compression: the buffers are used where they lie
        return len(body)
    total = len(body)
    for offset, length in batch.structs(2, "<qq"):
        if length:
            declared = _unpack("<q", body, offset)
            if declared < _STORED:
                raise ValueError(f"a buffer declares {declared} bytes")
            total += 0 if declared == _STORED else declared
    return total


class BatchSizes:
    """Checks each message of a file against `MAX_BATCH_BYTES`, and counts what it decodes to.

    Args:
        size: of the file, in bytes.
    """

    def __init__(self, size: int) -> None:
        self._limit = ExpansionLimit(size, "Arrow", "submit such rows as JSONL")
        self._dictionaries: dict[int, int] = {}

    def check(self, where: str, message: ArrowMessage, body: bytes) -> None:
        """Raises `BrokenInput` for a batch that would take too much memory, or if the file has decoded to too much;
        and `struct.error` or `ValueError`."""
        size = 0 if message.batch is None else decoded_bytes(message.batch, body)
        if message.kind == DICTIONARY_BATCH:
            before = self._dictionaries.get(message.dictionary, 0) if message.is_delta else 0
            self._dictionaries[message.dictionary] = work = before + size
            total = sum(self._dictionaries.values())
        else:  # the dictionaries are validated with each batch, even one without rows
            work = total = size + sum(self._dictionaries.values())
        check_size(where, total)
        self._limit.add(work, where)


def check_size(where: str, size: int) -> None:
    """Raises `BrokenInput` for a record batch of so many bytes, if that is too many."""
    if size > MAX_BATCH_BYTES:
        raise BrokenInput(
            f"{where}: takes {size} bytes when it is decoded, but {MAX_BATCH_BYTES} are allowed; write the file anew "
            "with fewer rows in a record batch"
        )


def _root(data: memoryview) -> FlatTable:
    return FlatTable(data, _unpack("<I", data, 0))


def _unpack(kind: str, data: memoryview | bytes, at: int) -> int:
    if at < 0:
        raise ValueError("an offset points before the data")
    value: int = struct.unpack_from(kind, data, at)[0]
    return value
