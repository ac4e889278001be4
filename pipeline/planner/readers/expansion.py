"""The bound on what an input may become when it is decoded, and the translation of errors in decoding.

A few kilobytes of Parquet, Arrow, gzip or zstd can stand for gigabytes. Readers decode a piece at a time, so memory is
bounded; this bounds the work.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from pipeline.planner.ports import BrokenInput, InputError
from pipeline.planner.readers.plain_types import shown

MAX_DECODED_ROWS: Final = 256
"""Rows decoded at once; fewer where they are large."""

MAX_ROW_BYTES: Final = 1 << 28
"""Maximum decoded bytes of a row; larger rows are refused before they are decoded."""

MAX_EXPANSION: Final = 10_000
"""Maximum decoded size as a multiple of the file's size. Texts that differ only in a number reach about a thousand."""

ALWAYS_DECODED_BYTES: Final = 1 << 30
"""Decoded bytes that are allowed for a file of any size."""


class ExpansionLimit:
    """Counts the decoded bytes of one file.

    Args:
        size: of the file, in bytes.  form: what the file is, for the message.  advice: what to do.
    """

    def __init__(self, size: int, form: str, advice: str) -> None:
        self._max_bytes = self._left = max(ALWAYS_DECODED_BYTES, MAX_EXPANSION * size)
        self._message = f"{size} bytes of {form} decode to more than {self._max_bytes} bytes, which is too large"
        self._advice = advice

    def add(self, decoded_bytes: int, where: str) -> None:
        """Count further bytes; raises `BrokenInput` above the limit."""
        self._left -= decoded_bytes
        if self._left < 0:
            raise BrokenInput(f"{where}: {self._message}; {self._advice}")


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Translate errors of reading and decoding: `BrokenInput` for data that Arrow or Python's codecs can't decode, and
    `InputError` when the system can't read the file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise InputError(f"{where}: can't be read: {error.strerror or error}") from error
        raise _broken(where, error) from error
    except (
        pa.ArrowException, struct.error, ValueError, OverflowError, LookupError, TypeError, NotImplementedError
    ) as error:  # fmt: skip
        raise _broken(where, error) from error


def _broken(where: str, error: Exception) -> BrokenInput:
    reason = shown(" ".join(str(error).split()), 500)
    return BrokenInput(f"{where}: can't be decoded: {reason or type(error).__name__}; write the file anew")
