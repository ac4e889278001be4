"""Parts of a file: what a `Range` header asks for (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*")
_CHUNK: Final = 256 * 1024


class Unsatisfiable(Exception):
    """Raised when a range lies behind the file's end."""


def wanted_bytes(header: str | None, size: int) -> range | None:
    """The bytes that are asked for; None: all of them, also where the header is one that may be passed over: malformed,
    of another unit, or of several ranges. Raises `Unsatisfiable`."""
    match = _RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:  # the last so many
        if int(match[2]) == 0 or size == 0:
            raise Unsatisfiable
        return range(max(0, size - int(match[2])), size)
    first = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < first:
        return None
    if first >= size:
        raise Unsatisfiable
    return range(first, min(last, size - 1) + 1)


def read_range(stream: BinaryIO, wanted: range) -> Iterator[bytes]:
    """Those bytes, a piece at a time; closes the stream."""
    with stream:
        stream.seek(wanted.start)
        left = len(wanted)
        while left and (data := stream.read(min(_CHUNK, left))):
            left -= len(data)
            yield data
