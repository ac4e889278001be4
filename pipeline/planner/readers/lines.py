"""The lines of a file as bytes, in bounded memory."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from pipeline.planner.ports import SourceFile

READ_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"
"""The byte order mark that some programs write before UTF-8."""


def lines_of(file: SourceFile, max_bytes: int) -> Generator[bytes | None]:
    """The file's lines without their `\\n`, None for one longer than `max_bytes`; buffers at most that and one read."""
    with file.open() as stream:
        rest = bytearray()
        skipping = False
        while chunk := stream.read(READ_BYTES):
            first, *others = chunk.split(b"\n")
            if not skipping:
                rest += first
            if others:
                yield None if skipping else _bounded(bytes(rest), max_bytes)
                for line in others[:-1]:
                    yield _bounded(line, max_bytes)
                rest, skipping = bytearray(others[-1]), False
            if len(rest) > max_bytes:
                rest, skipping = bytearray(), True
        if skipping:
            yield None
        elif rest:
            yield bytes(rest)


def _bounded(line: bytes, max_bytes: int) -> bytes | None:
    return line if len(line) <= max_bytes else None
