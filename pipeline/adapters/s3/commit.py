"""The conditional write on which an S3 store relies, and the test that a server honours it.

`If-None-Match: *` admits one of all racing writers. A writer whose answer was lost retries its request and gets
"exists"; so each write has an attempt id in the object's metadata, and a writer that finds its own id has won.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pipeline.adapters.s3.client import FIRST_WAIT, ConditionFailed, MissingObject, S3Connection
from pipeline.adapters.s3.multipart import UploadConflict, upload_parts
from pipeline.adapters.s3.stream import head_object
from pipeline.adapters.s3.url import join_url
from pipeline.ports import StoreError

ATTEMPT: Final = "tokenmill-attempt"
"""Name of the metadata that identifies the call that wrote an object."""

MAX_CONFLICTS: Final = 20
"""Maximum number of conflicting uploads of a key before the write fails."""

_PROBES: Final = ".tmp/probe-"
"""Parts that begin with a dot are the store's own: the leftovers of an interrupted probe never count as objects."""


def write_once(connection: S3Connection, bucket: str, key: str, write: Callable[[str], None]) -> bool:
    """Write until an object exists; returns whether it is this call's.

    Args:
        write: creates the object, if there is none, with the given attempt id (`put` or `send`).
    """
    attempt = connection.random.token(12).hex()
    for _ in range(MAX_CONFLICTS):
        try:
            write(attempt)
        except (ConditionFailed, UploadConflict):
            try:
                _, metadata = head_object(connection, bucket, key)
            except MissingObject:
                connection.pause(FIRST_WAIT)  # deleted since, or the other writer gave up
                continue
            return metadata.get(ATTEMPT) == attempt
        return True
    raise StoreError(
        f"{join_url(bucket, key)}: can't create it: other writers came and went {MAX_CONFLICTS} times; "
        "see who deletes there"
    )


def put(
    connection: S3Connection,
    bucket: str,
    key: str,
    attempt: str,
    body: bytes,
    *,
    retry_timeout_seconds: float | None = None,
) -> None:
    """Create the object in one request, if there is none; raises `ConditionFailed`."""
    arguments = {"Metadata": {ATTEMPT: attempt}} | connection.settings.encryption_arguments()
    connection.run(
        "create it",
        join_url(bucket, key),
        lambda: connection.client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*", **arguments),
        retry_timeout_seconds=retry_timeout_seconds,
    )


def send(connection: S3Connection, bucket: str, key: str, attempt: str, source: Path) -> None:
    """Create the object from a large file, if there is none; raises `ConditionFailed`, `UploadConflict`."""
    arguments: dict[str, Any] = {"Metadata": {ATTEMPT: attempt}} | connection.settings.encryption_arguments()
    upload_parts(connection, bucket, key, source, arguments)


def delete(connection: S3Connection, bucket: str, key: str) -> None:
    """Delete the object if it exists."""
    with contextlib.suppress(MissingObject):
        connection.run(
            "delete it", join_url(bucket, key), lambda: connection.client.delete_object(Bucket=bucket, Key=key)
        )


def probe(connection: S3Connection, bucket: str, prefix: str, *, retry_timeout_seconds: float) -> None:
    """Test create-if-absent in a bucket, below `prefix`.

    Raises:
        StoreError: the server doesn't support it, or can't be used at all.
    """
    first, second = (connection.random.token(12).hex() for _ in range(2))
    key = f"{prefix}{_PROBES}{first}"
    with contextlib.suppress(ConditionFailed):  # an earlier attempt of this write, whose answer was lost
        put(connection, bucket, key, first, b"1", retry_timeout_seconds=retry_timeout_seconds)
    try:
        with contextlib.suppress(ConditionFailed):
            put(connection, bucket, key, second, b"2", retry_timeout_seconds=retry_timeout_seconds)
            raise _unsafe(connection, bucket, "ignores If-None-Match, so two workers could commit the same part")
        _, metadata = head_object(connection, bucket, key)
        if metadata.get(ATTEMPT) != first:
            raise _unsafe(connection, bucket, "loses objects' metadata, so a writer could not know its own object")
    finally:
        delete(connection, bucket, key)


def probe_parts(connection: S3Connection, bucket: str, prefix: str, scratch: Path) -> None:
    """Test create-if-absent with multipart uploads. `scratch`: a path for a temporary file."""
    token = connection.random.token(12).hex()
    key = f"{prefix}{_PROBES}{token}"
    with contextlib.suppress(ConditionFailed):
        put(connection, bucket, key, token, b"1")
    try:
        scratch.write_bytes(b"2")
        with contextlib.suppress(ConditionFailed):
            upload_parts(connection, bucket, key, scratch, dict(connection.settings.encryption_arguments()))
            raise _unsafe(connection, bucket, "ignores If-None-Match when an upload in parts is completed")
    finally:
        scratch.unlink(missing_ok=True)
        delete(connection, bucket, key)


def _unsafe(connection: S3Connection, bucket: str, why: str) -> StoreError:
    server = connection.settings.endpoint or "AWS S3"
    return StoreError(f"{join_url(bucket, '')}: {server} {why}; use a server that supports conditional writes")
