"""Inputs in S3: pinned by version, else by ETag, so that pinning reads no bytes. Objects that an ingest source has
stored may be pinned by their hash alone; these are read once more, and from then on their ETag counts.

Every request while a job is planned is for exactly that state. So the bytes read of an object are the pinned ones, even
if it is replaced; in a bucket without versioning, a replaced object stops the job with an error.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import BinaryIO, Final

from pipeline.adapters.s3.client import ConditionFailed, MissingObject, S3Connection
from pipeline.adapters.s3.listing import list_objects
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.stream import ObjectVersion, head_object, open_snapshot
from pipeline.adapters.s3.url import join_url, split_url
from pipeline.inputs.reported_reads import with_reported_reads
from pipeline.planner.ports import InputError, SourceFile
from pipeline.planner.readers.source import choose_files
from schemas.jobs.inputs import InputFile, InputRef

MAX_MATCHES: Final = 10_000
"""Objects of one pattern."""

_CHUNK = 1 << 20
_MAGIC: Final = re.compile(r"[*?[]")


def pin_s3_input(url: str, s3: S3Connection | S3Settings | None = None, *, version: str | None = None) -> InputRef:
    """Pin one object's current state, or the objects of one format directly below a prefix that ends in "/".

    Args:
        url: s3://bucket/key.  version: of the object, if an event names one; None: the newest.

    Raises:
        InputError: there is no such object, or it is no input.
        StoreError: the bucket can't be used, or the URL is no S3 URL or contains credentials.
    """
    connection = connect(s3)
    bucket, key = split_url(url)
    folder = not key or key.endswith("/")
    names = list(_names_below(connection, bucket, key)) if folder else [key.rpartition("/")[2]]
    kind, chosen = choose_files(url, names, folder=folder)
    parent = key.rpartition("/")[0] + "/" if "/" in key else ""
    files = tuple(_pin(connection, bucket, parent + name, version) for name in chosen)
    return InputRef(uri=url, format=kind, files=files)


def find_s3_files(url: str, s3: S3Connection | S3Settings | None = None) -> list[SourceFile]:
    """The object at the URL, or those whose keys match its pattern, in the order of their keys; each is read in its
    state of now.

    Args:
        url: s3://bucket/key, in which `*`, `?` and `[...]` match within a part of the key, and the part `**` any number
            of parts. A key that has these characters itself is that object.

    Raises:
        InputError: there is no such object, or there are more than `MAX_MATCHES`.
        StoreError: as of `pin_s3_input`.
    """
    connection = connect(s3)
    bucket, key = split_url(url)
    if not key or key.endswith("/"):
        raise InputError(f"{url}: is no object; give a pattern of those below it, such as {url.rstrip('/')}/*.parquet")
    keys = [key]
    if (magic := _MAGIC.search(key)) is not None:
        listed = (found["Key"] for found in list_objects(connection, bucket, key[: magic.start()]))
        patterns = key.split("/")
        keys = list(
            islice((one for one in listed if one == key or _matches(one.split("/"), patterns)), MAX_MATCHES + 1)
        )
        keys = [key] if key in keys else keys
    if len(keys) > MAX_MATCHES:
        raise InputError(f"{url}: matches more than {MAX_MATCHES:,} objects; divide it")
    files = tuple(_pin(connection, bucket, one, None) for one in keys)
    states = (_state(connection, file, None) for file in files)
    return [SourceFile(state.url, partial(open_snapshot, connection, state, partial(_lost, state))) for state in states]


class PinnedS3Input:
    """A pinned input in S3 while it is read (`pipeline.inputs.open.PinnedInput`)."""

    def __init__(
        self,
        pinned: InputRef,
        s3: S3Connection | S3Settings | None = None,
        on_read: Callable[[], None] | None = None,
    ) -> None:
        """`on_read`: called after each read of an object, also when it is hashed once more."""
        self._connection = connect(s3)
        self._on_read = on_read
        self._states = [_state(self._connection, file, on_read) for file in pinned.files]

    def files(self) -> list[SourceFile]:
        """The objects, to be opened for planning. Reading raises `InputError` when one is gone or was replaced."""
        return [SourceFile(state.url, partial(self._open, state)) for state in self._states]

    def check(self) -> None:
        """Check that the objects still exist in their pinned state.

        Raises:
            InputError: one of them is gone or was replaced.  StoreError: the bucket can't be used.
        """
        for state in self._states:
            arguments = {name: value for name, value in state.arguments().items() if name not in ("Bucket", "Key")}
            try:
                found, _ = head_object(self._connection, state.bucket, state.key, **arguments)
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
    """The connection itself, or a new one with these settings."""
    return s3 if isinstance(s3, S3Connection) else S3Connection(s3)


def _pin(connection: S3Connection, bucket: str, key: str, version: str | None) -> InputFile:
    arguments = {} if version is None else {"VersionId": version}
    try:
        state, _ = head_object(connection, bucket, key, **arguments)
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
        state, _ = head_object(connection, bucket, key)
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
    for found in list_objects(connection, bucket, prefix, delimiter="/"):
        if found["Key"] != prefix:  # consoles create such an object for a folder
            yield found["Key"].removeprefix(prefix)


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a key match those of a pattern, of which "**" stands for any number of parts."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])
