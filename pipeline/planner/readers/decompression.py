"""Files compressed with gzip or zstd, decompressed while they are read.

A compressed stream can't be entered in its middle, and needn't be: a planner reads an input from its start, also when
it resumes. Several gzip members or zstd frames are one text. A zstd frame whose window is larger than 128 MiB is
refused by the codec.
"""

from __future__ import annotations

import io
import os
import re
from functools import partial
from typing import BinaryIO, Final, cast

import pyarrow as pa

from pipeline.planner.ports import BrokenInput, InputError, SourceFile
from pipeline.planner.readers.expansion import ExpansionLimit

SUFFIXES: Final = {".gz": "gzip", ".zst": "zstd"}
"""The last suffix of a name -> the codec."""

_SIGNATURES: Final = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""First bytes of the codecs' streams; a zstd stream may begin with a frame to be skipped."""


def decompressed(file: SourceFile) -> SourceFile:
    """The file with its text in place of gzip or zstd. The codec is the one of the name's suffix; for any other name,
    such as an upload's, the one of the first bytes, with which no JSON or CSV begins."""
    return SourceFile(file.name, partial(_open, file))


def _open(file: SourceFile) -> BinaryIO:
    stream = file.open()
    try:
        named = [codec for suffix, codec in SUFFIXES.items() if file.name.lower().endswith(suffix)]
        start = stream.read(4)
        found = named or [codec for codec, signature in _SIGNATURES.items() if signature.match(start)]
        if found:
            return cast("BinaryIO", _Decompressed(file.name, stream, found[0]))
        stream.seek(0)
        return stream
    except BaseException:
        stream.close()
        raise


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a stream, which it closes; reading raises `BrokenInput` for damaged data."""

    def __init__(self, name: str, stream: BinaryIO, codec: str) -> None:
        self._name = name
        self._codec = codec
        self._stream = stream
        self._limit = ExpansionLimit(stream.seek(0, os.SEEK_END), codec, "submit it in several smaller files")
        self._lines = 0
        stream.seek(0)
        self._inner = pa.CompressedInputStream(pa.PythonFile(stream, "r"), codec)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._inner.read(None if size < 0 else size)
        except OSError as error:
            if error.errno is not None:
                raise InputError(f"{self._name}: can't be read: {error.strerror or error}") from error
            raise self._damaged(error) from error
        except MemoryError as error:
            raise self._damaged(error) from error
        self._limit.add(len(data), f"{self._name}: line {self._lines + 1}")
        self._lines += data.count(b"\n")
        return data

    def _damaged(self, error: Exception) -> BrokenInput:
        reason = " ".join(str(error).split())[:500]
        advice = "compress it anew, and transfer it whole"
        if "too much memory" in reason:
            advice = "compress it with a window of at most 128 MiB (zstd --long=27)"
        return BrokenInput(
            f"{self._name}: can't be decompressed as {self._codec} after line {self._lines}, within the first "
            f"{self._stream.tell()} bytes of the file: {reason}; {advice}"
        )

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
