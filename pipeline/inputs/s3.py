"""Inputs in S3: pinned by version, else by ETag, so that no byte has to be read to know what a job reads. What a door
has stored itself may be pinned by its hash alone; it is read once more then, and from there on it is its ETag that
counts.

Every request while a job is planned asks for exactly that state. So what was read of an object is what was pinned,
whatever others put in its place; where the bucket keeps no versions, a replaced object stops the job with one line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

from pipeline.adapters.s3.client import ConditionFailed, MissingObject, S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.stream import ObjectVersion, look, open_snapshot
from pipeline.adapters.s3.url import join_url, split_url
from pipeline.inputs.reported_reads import with_reported_reads
from pipeline.planner.api import InputError, SourceFile
from pipeline.planner.readers.source import choose_files
from schemas.jobs.inputs import InputFile, InputRef

_CHUNK = 1 << 20


def pin_s3_input(url: str, s3: S3Connection | S3Settings | None = None, *, version: str | None = None) -> InputRef:
    """One object as it is now, or the .jsonl or .parquet objects directly below a prefix that ends in "/".

    Args:
        url: s3://bucket/key.  version: of the object, where an event names one; None: the newest.

    Raises:
        InputError: there is no such object, or nothing that is an input.
        StoreError: the bucket can't be used, or the URL is none or carries credentials.
    """
    connection = connect(s3)
    bucket, key = split_url(url)
    folder = not key or key.endswith("/")
    names = list(_names_below(connection, bucket, key)) if folder else [key.rpartition("/")[2]]
    kind, chosen = choose_files(url, names, folder=folder)
    parent = key.rpartition("/")[0] + "/" if "/" in key else ""
    files = tuple(_pin(connection, bucket, parent + name, version) for name in chosen)
    return InputRef(uri=url, format=kind, files=files)


class PinnedS3Input:
    """A pinned input in S3 while it is read (`pipeline.inputs.open.PinnedInput`)."""

    def __init__(
        self,
        pinned: InputRef,
        s3: S3Connection | S3Settings | None = None,
        on_read: Callable[[], None] | None = None,
    ) -> None:
        """`on_read`: called whenever some of an object was read, also when it is hashed once more."""
        self._connection = connect(s3)
        self._on_read = on_read
        self._states = [_state(self._connection, file, on_read) for file in pinned.files]

    def files(self) -> list[SourceFile]:
        """To be opened for planning. Reading raises `InputError` when one is gone or was replaced."""
        return [SourceFile(state.url, partial(self._open, state)) for state in self._states]

    def check(self) -> None:
        """Whether the objects are still there as they were pinned.

        Raises:
            InputError: one of them is gone or was replaced.  StoreError: the bucket can't be used.
        """
        for state in self._states:
            arguments = {name: value for name, value in state.arguments().items() if name not in ("Bucket", "Key")}
            try:
                found, _ = look(self._connection, state.bucket, state.key, **arguments)
            except (MissingObject, ConditionFailed) as error:
                raise _lost(state, error) from error
            if found.size != state.size:
                raise InputError(
                    f"{state.url}: has {found.size} bytes, but had {state.size} when the job was accepted; "
                    "put the old object back, or submit the new one as a job of its own"
                )

    def _open(self, state: ObjectVersion) -> BinaryIO:
        return with_reported_reads(open_snapshot(self._connection, state, partial(_lost, state)), self._on_read)


def connect(s3: S3Connection | S3Settings | None) -> S3Connection:
    """The connection itself, or a new one of these settings."""
    return s3 if isinstance(s3, S3Connection) else S3Connection(s3)


def _pin(connection: S3Connection, bucket: str, key: str, version: str | None) -> InputFile:
    asked = {} if version is None else {"VersionId": version}
    try:
        state, _ = look(connection, bucket, key, **asked)
    except MissingObject as error:
        raise InputError(f"{join_url(bucket, key)}: no such object; check the input's URL") from error
    return InputFile(uri=state.url, size=state.size, version=state.version, etag=state.etag)


def _state(connection: S3Connection, file: InputFile, on_read: Callable[[], None] | None) -> ObjectVersion:
    bucket, key = split_url(file.uri)
    if file.version is not None or file.etag is not None:
        return ObjectVersion(bucket, key, file.size, file.etag, file.version)
    if file.sha256 is None:
        raise InputError(f"{file.uri}: was pinned neither to a version, an ETag nor a hash; submit it again")
    try:
        state, _ = look(connection, bucket, key)
    except MissingObject as error:
        raise InputError(f"{file.uri}: is gone since the job was accepted; put it back and run again") from error
    digest = hashlib.sha256()
    with with_reported_reads(open_snapshot(connection, state, partial(_lost, state)), on_read) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if (state.size, digest.hexdigest()) != (file.size, file.sha256):
        raise InputError(f"{file.uri}: holds other bytes than when the job was accepted; put the old object back")
    return state


def _lost(state: ObjectVersion, error: MissingObject | ConditionFailed) -> InputError:
    if isinstance(error, MissingObject):
        what = "is gone" if state.version is None else f"version {state.version} is gone"
        return InputError(f"{state.url}: {what} since the job was accepted; put it back and run again")
    return InputError(
        f"{state.url}: was replaced after the job was accepted, and the bucket keeps no versions; "
        "put the old object back, or submit the new one as a job of its own"
    )


def _names_below(connection: S3Connection, bucket: str, prefix: str) -> Iterator[str]:
    """Names of the objects directly below the prefix."""
    request: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
    while True:
        page = connection.run(
            "list it", join_url(bucket, prefix), partial(connection.client.list_objects_v2, **request)
        )
        for found in page.get("Contents", []):
            if found["Key"] != prefix:  # what consoles make for a folder
                yield found["Key"].removeprefix(prefix)
        if not page.get("IsTruncated"):
            return
        request["ContinuationToken"] = page["NextContinuationToken"]
