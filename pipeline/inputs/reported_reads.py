"""A stream that reports each read, for the detection of stalled reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BufferedReader, RawIOBase
from typing import Any, Final

_BUFFER_BYTES: Final = 1 << 16


def with_reported_reads(stream: BufferedReader, on_read: Callable[[], None] | None) -> BufferedReader:
    """A seekable stream over `stream`, which it closes; `on_read` is called after each read, on the reading thread.
    None: no reports, and `stream` itself is returned."""
    return stream if on_read is None else BufferedReader(_ReportedReads(stream, on_read), _BUFFER_BYTES)


class _ReportedReads(RawIOBase):
    def __init__(self, stream: BufferedReader, on_read: Callable[[], None]) -> None:
        self._stream = stream
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        if count:
            self._on_read()
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
