"""Downloads of files: conditional and range requests (RFC 9110, sections 13 and 14), and compressed results.

A compressed download has a weak ETag, as its bytes are others; so ranges, which are always of the file itself, are
never joined to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final
from urllib.parse import quote

from fastapi import Response
from fastapi.responses import StreamingResponse

from pipeline.gateway.files.service import Files
from pipeline.gateway.http.compression import MIN_BYTES, Coding, compressed
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import StoredFile

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*")
_CHUNK_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class ContentHeaders:
    """The headers of a request for a file's content: Range, If-Range and If-None-Match, and the coding by
    Accept-Encoding."""

    range: str | None
    if_range: str | None
    if_none_match: str | None
    coding: Coding | None


class UnsatisfiableRange(Exception):
    """Raised when a range begins after the file's end."""


def content_response(files: Files, file: StoredFile, request: ContentHeaders) -> Response:
    """The response with the file's bytes, or a range of them; raises `ApiError` (404, 416)."""
    tag = f'"{file.sha256}"'
    headers = {
        "ETag": tag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "Content-Type": "application/octet-stream",
    }
    coding = None
    if file.purpose == "batch_output":  # uploads may be compressed already
        headers["Vary"] = "Accept-Encoding"
        if request.coding is not None and request.range is None and file.size >= MIN_BYTES:
            coding = request.coding
            headers["ETag"] = f"W/{tag}"
    if request.if_none_match in (tag, f"W/{tag}", "*"):
        return Response(status_code=304, headers=headers)
    try:
        selected = parse_range(request.range if request.if_range in (None, tag) else None, file.size)
    except UnsatisfiableRange:
        raise ApiError(
            416,
            "range_not_satisfiable",
            f"the file has {file.size} bytes, and the range lies behind them",
            headers={"Content-Range": f"bytes */{file.size}"},
        ) from None
    if coding is not None:
        headers["Content-Encoding"] = coding
        del headers["Accept-Ranges"]
        data = compressed(read_range(files.open(file), range(file.size)), coding)
        return StreamingResponse(data, headers=headers)
    status = 200 if selected is None else 206
    if selected is None:
        selected = range(file.size)
    else:
        headers["Content-Range"] = f"bytes {selected.start}-{selected.stop - 1}/{file.size}"
    headers["Content-Length"] = str(len(selected))
    return StreamingResponse(read_range(files.open(file), selected), status_code=status, headers=headers)


def parse_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header selects. None: all bytes, also for a header that is ignored: a malformed one, one
    of another unit, or one of several ranges. Raises `UnsatisfiableRange`."""
    match = _RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:  # a suffix range: the last bytes
        if int(match[2]) == 0 or size == 0:
            raise UnsatisfiableRange
        return range(max(0, size - int(match[2])), size)
    first = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < first:
        return None
    if first >= size:
        raise UnsatisfiableRange
    return range(first, min(last, size - 1) + 1)


def read_range(stream: BinaryIO, selected: range) -> Iterator[bytes]:
    """Read the selected bytes in chunks; closes the stream."""
    with stream:
        stream.seek(selected.start)
        remaining = len(selected)
        while remaining and (data := stream.read(min(_CHUNK_BYTES, remaining))):
            remaining -= len(data)
            yield data
