"""An object of S3 as a seekable stream: each piece is a request of its own for a range of one unchanging state.

One long answer would be cheaper, but servers cut connections that wait, and a reader may plan for minutes between two
lines. So a lost connection costs one piece, and every piece is of the same version or ETag, or none.
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
    """One state of an object. `size` in bytes; `version` where the bucket keeps versions; `etag` with its quotes."""

    bucket: str
    key: str
    size: int
    etag: str | None = None
    version: str | None = None

    @property
    def url(self) -> str:
        return join_url(self.bucket, self.key)

    def arguments(self) -> dict[str, str]:
        """What makes a request one for this state."""
        found = {"Bucket": self.bucket, "Key": self.key}
        if self.version is not None:
            found["VersionId"] = self.version
        if self.etag is not None:
            found["IfMatch"] = self.etag
        return found


def look(connection: S3Connection, bucket: str, key: str, **arguments: str) -> tuple[ObjectVersion, dict[str, str]]:
    """An object's state now, and its metadata; raises `MissingObject`, `ConditionFailed`, `StoreError`."""
    request = {"Bucket": bucket, "Key": key} | arguments
    answer = connection.run("look at it", join_url(bucket, key), lambda: connection.client.head_object(**request))
    version = answer.get("VersionId")
    state = ObjectVersion(
        bucket,
        key,
        int(answer["ContentLength"]),
        answer.get("ETag"),
        None if version in (None, "null") else version,  # "null": the bucket keeps no versions now, so it may change
    )
    return state, dict(answer.get("Metadata", {}))


def open_snapshot(
    connection: S3Connection, state: ObjectVersion, lost: Callable[[MissingObject | ConditionFailed], Exception]
) -> io.BufferedReader:
    """A seekable stream over that state.

    Args:
        lost: the error to raise when it is no longer there.
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

    def _fetch(self, most: int) -> bytes:
        """The next bytes, at most so many; moves on."""
        count = min(most, self._state.size - self._position)
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
