"""Streaming multipart uploads: the file is written to the scratch folder piece by piece, up to a limit, and is never in
memory as a whole. The file name that the client sends is data and never used as a path."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from pipeline.gateway.http.body_reading import pieces
from pipeline.gateway.http.errors import ApiError, bad_request, storage_full
from pipeline.planner.readers.source import format_of_upload
from pipeline.ports import World, failure_type
from schemas.jobs.inputs import InputFormat

MIN_LIFETIME: Final = timedelta(hours=1)
MAX_LIFETIME: Final = timedelta(days=30)
_WHOLE: Final = re.compile("[0-9]{1,9}")
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_PARTS: Final = 16
_MAX_FIELD_BYTES: Final = 1_024
_MAX_HEADER_BYTES: Final = 8_192
_FORM_OVERHEAD_BYTES: Final = 64 * 1024
"""The bound of a body's bytes besides its file: boundaries, headers and fields."""
_WRITE_BYTES: Final = 1 << 20
_MIN_BYTES_PER_SECOND: Final = 4_096
"""The minimum rate of an upload: it holds a slot that other uploads wait for."""
_SPARE_BYTES: Final = 256 << 20
"""Disk space that an upload leaves free."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A complete upload. The consumer may move the file at `path`."""

    path: Path
    filename: str
    size: int
    sha256: str
    format: InputFormat
    expires_after: timedelta | None


@asynccontextmanager
async def receive(request: Request, world: World, max_bytes: int, idle_seconds: float) -> AsyncIterator[Upload]:
    """Receive the request's upload; the file is removed when the block ends.

    Raises:
        ApiError: the body is no valid form, is too large or too slow, or the disk is full.
        StoreError: the file can't be written.
    """
    parser = FormReader(_boundary(request), max_bytes)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + _FORM_OVERHEAD_BYTES:
        raise parser.too_large()
    path = world.scratch / f"upload-{world.random.token(12).hex()}"
    file = _Writer(path)
    try:
        async for piece in pieces(request, idle_seconds, _MIN_BYTES_PER_SECOND):
            parser.feed(piece)
            if len(parser.waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, parser.take())
        parser.end()
        await asyncio.to_thread(file.write, parser.take())
        await asyncio.to_thread(file.close)
        yield Upload(
            path=path,
            filename=parser.filename or "",
            size=file.size,
            sha256=file.digest.hexdigest(),
            format=format_of_upload(file.start, parser.filename or ""),
            expires_after=parser.expires_after(),
        )
    finally:
        file.close()
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class _Writer:
    """A file that is being written, with its size in bytes, its hash, and its first four bytes."""

    path: Path
    size: int = 0
    start: bytes = b""
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    _stream: BinaryIO | None = None

    def write(self, data: bytes) -> None:
        try:
            if self._stream is None:
                self._stream = self.path.open("xb")
            if shutil.disk_usage(self.path.parent).free < _SPARE_BYTES:
                raise storage_full()
            self._stream.write(data)
        except OSError as error:
            raise failure_type(error)(f"{self.path}: can't store an upload: {error.strerror or error}") from error
        self.digest.update(data)
        self.start = (self.start + data[:4])[:4]
        self.size += len(data)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class FormReader:
    """Incremental parser of a form with one file and some short fields.

    Attributes:
        waiting: parsed bytes of the file that aren't taken yet.  filename: of the file; None: not parsed yet.
    """

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self.waiting = bytearray()
        self.filename: str | None = None
        self._max_bytes = max_bytes
        self._size = 0
        self._parts = 0
        self._is_complete = False
        self._fields: dict[str, bytearray] = {}
        self._header = (bytearray(), bytearray())
        self._header_bytes = 0
        self._disposition = b""
        self._into: bytearray | None = None  # the buffer of the current part
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_end": self._end,
            },
        )

    def feed(self, piece: bytes) -> None:
        """Parse the next piece; raises `ApiError`."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise bad_request(f"the form can't be read: {error}", code="invalid_form") from None

    def take(self) -> bytes:
        """Take the parsed bytes of the file."""
        data = bytes(self.waiting)
        self.waiting.clear()
        return data

    def end(self) -> None:
        """Check the complete form; raises `ApiError` when something is missing or invalid."""
        if not self._is_complete:
            raise bad_request("the form ends before its last boundary; send it whole", code="invalid_form")
        if self.filename is None:
            raise bad_request("the form has no file; add one", param="file")
        purpose = self._text("purpose")
        if purpose is None:
            raise bad_request("purpose is missing; say purpose=batch", param="purpose")
        if purpose != "batch":
            raise bad_request(f"purpose is {purpose[:40]!r}, but only batch is supported", param="purpose")
        if not self._size:
            raise bad_request("the file is empty; send some requests", param="file")
        self.expires_after()

    def expires_after(self) -> timedelta | None:
        """The lifetime that the form asks for; raises `ApiError`."""
        anchor, seconds = self._text("expires_after[anchor]"), self._text("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise bad_request("expires_after.anchor must be 'created_at'", param="expires_after.anchor")
        low, high = int(MIN_LIFETIME.total_seconds()), int(MAX_LIFETIME.total_seconds())
        if seconds is None or _WHOLE.fullmatch(seconds) is None or not low <= int(seconds) <= high:
            message = f"expires_after.seconds must be an integer from {low} to {high}"
            raise bad_request(message, param="expires_after.seconds")
        return timedelta(seconds=int(seconds))

    def too_large(self) -> ApiError:
        """The error for a file above the limit (413)."""
        message = f"the file is larger than {self._max_bytes:,} bytes; cut it into several batches"
        return ApiError(413, "file_too_large", message, param="file")

    def _text(self, name: str) -> str | None:
        data = self._fields.get(name)
        return None if data is None else data.decode(errors="replace")

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"the form has more than {_MAX_PARTS} parts", code="invalid_form")
        self._disposition, self._header_bytes, self._into = b"", 0, None

    def _add_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise bad_request("a part of the form has too large a header", code="invalid_form")
        self._header[which].extend(data)

    def _end_header(self) -> None:
        name, value = bytes(self._header[0]).lower(), bytes(self._header[1])
        if name == b"content-disposition":
            self._disposition = value
        self._header = (bytearray(), bytearray())

    def _begin_data(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or name not in ("file", *_FIELDS):
            raise bad_request(
                f"the form has a field {name[:80]!r}, which is not known; it takes file, purpose and expires_after",
                param=name[:80] or None,
            )
        if name != "file":
            if name in self._fields:
                raise bad_request(f"{name} is given twice", param=name)
            self._into = self._fields[name] = bytearray()
            return
        if self.filename is not None:
            raise bad_request("there are two files; send one at a time", param="file")
        self.filename = _cleaned(options.get(b"filename", b"").decode(errors="replace"))
        self._into = self.waiting

    def _add(self, data: bytes) -> None:
        assert self._into is not None, "a part's headers come before its data"
        self._into += data
        if self._into is self.waiting:
            self._size += len(data)
            if self._size > self._max_bytes:
                raise self.too_large()
        elif len(self._into) > _MAX_FIELD_BYTES:
            raise bad_request("a field of the form is too long", code="invalid_form")

    def _end(self) -> None:
        self._is_complete = True


def declared_size(request: Request) -> int:
    """A lower bound of the file's size in bytes, from the request's Content-Length; 0 without that header."""
    declared = request.headers.get("content-length", "")
    return max(0, int(declared) - _FORM_OVERHEAD_BYTES) if declared.isdigit() else 0


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise ApiError(415, "unsupported_media_type", "send the file as multipart/form-data, with a boundary")
    return boundary


def _cleaned(name: str) -> str:
    """The file name without characters that would break a header or a log line; otherwise unchanged."""
    shown = "".join(character if character.isprintable() else "_" for character in name)[:255]
    return shown or "upload.jsonl"
