"""An S3 object as a seekable stream: each piece is a request of its own for a range of one fixed state.

One long answer would be cheaper, but servers close idle connections, and a reader may plan for minutes between two
lines. So a lost connection costs one piece, and all pieces are of the same version or ETag; else the read fails.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import IncompleteReadError

from pipeline.adapters.s3.client import ConditionFailed, MissingObject, S3Connection
from pipeline.adapters.s3.url import join_url


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One state of an object. `size` in bytes; `version` in a bucket with versioning; `etag` with its quotes."""

    bucket: str
    key: str
    size: int
    etag: str | None = None
    version: str | None = None

    @property
    def url(self) -> str:
        return join_url(self.bucket, self.key)

    def arguments(self) -> dict[str, str]:
        """Arguments that restrict a request to this state."""
        found = {"Bucket": self.bucket, "Key": self.key}
        if self.version is not None:
            found["VersionId"] = self.version
        if self.etag is not None:
            found["IfMatch"] = self.etag
        return found


def head_object(
    connection: S3Connection, bucket: str, key: str, **arguments: str
) -> tuple[ObjectVersion, dict[str, str]]:
    """An object's current state, and its metadata; raises `MissingObject`, `ConditionFailed`, `StoreError`."""
    request = {"Bucket": bucket, "Key": key} | arguments
    answer = connection.run("look at it", join_url(bucket, key), lambda: connection.client.head_object(**request))
    version = answer.get("VersionId")
    state = ObjectVersion(
        bucket,
        key,
        int(answer["ContentLength"]),
        answer.get("ETag"),
        None if version in (None, "null") else version,  # "null": no versioning now, so the object may change
    )
    return state, dict(answer.get("Metadata", {}))


def open_snapshot(
    connection: S3Connection, state: ObjectVersion, lost: Callable[[MissingObject | ConditionFailed], Exception]
) -> io.BufferedReader:
    """A seekable stream over that state.

    Args:
        lost: returns the error to raise when the state no longer exists.
    """
    return io.BufferedReader(_Reader(connection, state, lost), connection.settings.read_bytes)


class _Reader(io.RawIOBase):
    def __init__(
        self,
        connection: S3Connection,
        state: ObjectVersion,
        lost: Callable[[MissingObject | ConditionFailed], Exception],
    ) -> None:
        self._connection = connection
        self._state = state
        self._lost = lost
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._state.size}[whence]
        if start + offset < 0:
            raise ValueError(f"negative seek position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._fetch(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._fetch(self._state.size)

    def _fetch(self, max_bytes: int) -> bytes:
        """Read the next bytes, at most so many, and advance the position."""
        count = min(max_bytes, self._state.size - self._position)
        if count <= 0:
            return b""
        request = self._state.arguments() | {"Range": f"bytes={self._position}-{self._position + count - 1}"}

        def get() -> bytes:
            data: bytes = self._connection.client.get_object(**request)["Body"].read()
            if len(data) != count:
                raise IncompleteReadError(actual_bytes=len(data), expected_bytes=count)
            return data

        try:
            data = self._connection.run("read it", self._state.url, get)
        except (MissingObject, ConditionFailed) as error:
            raise self._lost(error) from error
        self._position += count
        return data
