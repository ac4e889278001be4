"""Arrow's two forms, the IPC stream and the IPC file (Feather version 2), as record batches whose sizes are checked
before they are decoded (`arrow_messages`).

Each message is read once, checked, and then handed to pyarrow. A stream must end with its end mark and a file with its
footer: without them rows may be missing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import BinaryIO, Final

import pyarrow as pa

from pipeline.planner.ports import BrokenInput
from pipeline.planner.readers.arrow_messages import (
    MAX_BATCH_BYTES,
    ArrowBlock,
    BatchSizes,
    check_size,
    parse_footer,
    parse_message,
)
from pipeline.planner.readers.expansion import decoding

FILE_MAGIC: Final = b"ARROW1"
CONTINUATION: Final = b"\xff\xff\xff\xff"
_MAX_METADATA_BYTES: Final = 16 << 20


def read_schema(name: str, stream: BinaryIO) -> pa.Schema:
    """The schema of an Arrow file or stream. Raises `InputError`, `BrokenInput`."""
    with decoding(name):
        if _is_file(stream):
            return pa.ipc.open_file(stream).schema
        return pa.ipc.open_stream(pa.PythonFile(_Messages(name, stream), "r")).schema


def read_batches(name: str, stream: BinaryIO) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The record batches in order, each with its location for messages. Raises as `read_schema`."""
    yield from _from_file(name, stream) if _is_file(stream) else _from_stream(name, stream)


def _from_file(name: str, stream: BinaryIO) -> Iterator[tuple[str, pa.RecordBatch]]:
    blocks = _Blocks(stream)
    with decoding(name):
        reader = pa.ipc.open_file(pa.PythonFile(blocks, "r"))  # it verifies the footer
        dictionaries, batches = parse_footer(blocks.footer())
        for block in dictionaries:
            blocks.load(f"{name}: its dictionaries", block)
    for index, block in enumerate(batches):
        where = f"{name}: record batch {index + 1} of {len(batches)}"
        with decoding(where):
            blocks.load(where, block)
            batch = reader.get_batch(index)
        yield where, batch


def _from_stream(name: str, stream: BinaryIO) -> Iterator[tuple[str, pa.RecordBatch]]:
    with decoding(name):
        reader = pa.ipc.open_stream(pa.PythonFile(_Messages(name, stream), "r"))
    index = 0
    while True:
        index += 1
        where = f"{name}: record batch {index}"
        with decoding(where):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                if more := len(stream.read(1)):
                    raise BrokenInput(
                        f"{name}: more follows behind the end of the Arrow stream, at byte {stream.tell() - more}; "
                        "write one stream to a file"
                    ) from None
                return
        yield where, batch


def _is_file(stream: BinaryIO) -> bool:
    stream.seek(0)
    start = stream.read(len(FILE_MAGIC))
    stream.seek(0)
    return start == FILE_MAGIC


class _Messages(io.RawIOBase):
    """An Arrow stream as pyarrow reads it: a message's parts, one after the other. Each message is checked first."""

    def __init__(self, name: str, stream: BinaryIO) -> None:
        self._name = name
        self._stream = stream
        self._left = stream.seek(0, os.SEEK_END)
        self._sizes = BatchSizes(self._left)
        self._number = 0
        self._parts: list[memoryview] = []
        stream.seek(0)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> memoryview:  # not copied
        if not self._parts:
            self._load()
        part = self._parts[0]
        size = len(part) if size < 0 else size
        self._parts[:1] = [part[size:]] if size < len(part) else []
        return part[:size]

    def _load(self) -> None:
        """Read and check the next message."""
        self._number += 1
        where = f"{self._name}: message {self._number}"
        prefix = self._take(where, 8)
        if not prefix.startswith(CONTINUATION):
            raise BrokenInput(f"{where}: is no Arrow message; write the file anew as an Arrow file or stream")
        length = int.from_bytes(prefix[4:], "little")
        parts = [prefix[:4], prefix[4:]]
        if length:
            metadata = self._take(where, length, _MAX_METADATA_BYTES)
            message = parse_message(metadata)
            body = self._take(where, message.body_bytes)
            self._sizes.check(where, message, body)
            parts += [metadata, body]
        self._parts = [memoryview(part) for part in parts if part]

    def _take(self, where: str, size: int, allowed: int = MAX_BATCH_BYTES) -> bytes:
        if size > self._left:
            raise BrokenInput(
                f"{where}: the file ends before the message does, or without the mark of its end; write it whole"
            )
        if not 0 <= size <= allowed:
            raise BrokenInput(f"{where}: has a part of {size} bytes, but {allowed} are allowed; write smaller ones")
        self._left -= size
        data = self._stream.read(size)
        if len(data) < size:
            raise BrokenInput(f"{where}: the file ends before the message does; write it whole")
        return data


class _Blocks(io.RawIOBase):
    """An Arrow file as pyarrow reads it. The bytes of the latest block come from memory, not from the file again."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = stream.seek(0, os.SEEK_END)
        self._sizes = BatchSizes(self._size)
        self._at = self._start = 0
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes | memoryview:  # a block is not copied
        first = self._at - self._start
        if first >= 0 and 0 <= size <= len(self._block) - first:
            data: bytes | memoryview = self._block[first : first + size]
        else:
            self._stream.seek(self._at)
            data = self._stream.read(max(0, min(size if size >= 0 else self._size, self._size - self._at)))
        self._at += len(data)
        return data

    def footer(self) -> bytes:
        """The footer's table; its length and the magic follow it at the file's end."""
        length, magic = self._bytes(self._size - 10, 4), self._bytes(self._size - 6, 6)
        if magic != FILE_MAGIC:
            raise ValueError("the footer is missing")
        size = int.from_bytes(length, "little")
        return self._bytes(self._size - 10 - size, size)

    def load(self, where: str, block: ArrowBlock) -> None:
        """Read a block, and check it."""
        metadata = self._bytes(block.offset, block.metadata_bytes)
        message = parse_message(metadata[8 if metadata.startswith(CONTINUATION) else 4 :])
        if message.body_bytes > block.body_bytes:
            raise ValueError(f"a body of {message.body_bytes} bytes lies in a block of {block.body_bytes}")
        check_size(where, message.body_bytes)
        body = self._bytes(block.offset + block.metadata_bytes, message.body_bytes)
        self._sizes.check(where, message, body)
        self._start, self._block = block.offset, memoryview(metadata + body)

    def _bytes(self, at: int, size: int) -> bytes:
        if at < 0 or size < 0 or at + size > self._size:
            raise ValueError(f"{size} bytes at {at} lie outside of the file")
        self._stream.seek(at)
        return self._stream.read(size)
