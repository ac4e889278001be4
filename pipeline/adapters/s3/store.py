"""An object store in an S3 bucket, or below a prefix of one.

An object is created by one conditional write (`commit.py`), atomically, and one of racing writers wins. A server that
ignores the condition would admit two commits, so it is refused when the store is opened.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from pipeline.adapters.folder.durable import LOCAL_DISK
from pipeline.adapters.folder.scratch import PrivateFolder
from pipeline.adapters.object_keys import MAX_KEY_BYTES, check_key, check_prefix, is_object_name
from pipeline.adapters.s3.client import ConditionFailed, MissingObject, S3Connection
from pipeline.adapters.s3.commit import delete, probe, probe_parts, put, send, write_once
from pipeline.adapters.s3.multipart import abort_stale
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.stream import head_object, open_snapshot
from pipeline.adapters.s3.url import join_url, split_url
from pipeline.adapters.store_clock import TimeOffset
from pipeline.ports import ObjectInfo, ObjectNotFound, StoreError


class S3Store:
    """`ObjectStore` below `prefix` of a bucket. Threads may share one; `close` removes its scratch folder.

    Args:
        bucket: an existing bucket.  prefix: of all keys; "" or parts separated by "/", with an optional "/" at the end.
        connection: to the server, with settings, clock and randomness.
        read_only: write nothing; the bucket isn't probed for conditional writes.

    Raises:
        StoreError: no such bucket, no credentials, not allowed, out of reach, or conditional writes are ignored.
    """

    def __init__(self, bucket: str, prefix: str, connection: S3Connection, *, read_only: bool = False) -> None:
        self.bucket = bucket
        self.prefix = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
        if self.prefix:
            check_key(self.prefix.rstrip("/"))
        self._connection = connection
        self._client = connection.client
        self._private: PrivateFolder | None = None
        self._parts_probed = False
        retry_timeout_seconds = connection.settings.opening_retry_timeout_seconds
        if read_only:
            self._page(self.prefix, MaxKeys=1, retry_timeout_seconds=retry_timeout_seconds)
        else:
            probe(connection, bucket, self.prefix, retry_timeout_seconds=retry_timeout_seconds)
        connection.record_proven(join_url(bucket, self.prefix))
        if read_only:
            return
        self._private = _private_folder(connection.settings.scratch)

    @classmethod
    def from_url(cls, url: str, settings: S3Settings | None = None, *, read_only: bool = False) -> S3Store:
        """The store at `s3://bucket/prefix`; raises `StoreError` also for a URL that is none or carries a secret."""
        bucket, prefix = split_url(url)
        return cls(bucket, prefix, S3Connection(settings), read_only=read_only)

    @property
    def time_offset(self) -> TimeOffset:
        """The server's time minus this machine's."""
        return self._connection.time_offset

    @property
    def scratch(self) -> Path:
        """A private local folder for files that are still being built."""
        return self._writable().path

    def create(self, key: str, data: bytes | Path) -> bool:
        """Create the object durably; False if it exists already, and then nothing was changed.

        A `Path` is a closed local file whose ownership passes to the store: it is gone when this returns or raises.
        """
        full = self._full(key)
        try:
            self._writable()
            if not isinstance(data, Path):
                return self._put(full, data)
            if data.stat().st_size < self._connection.settings.multipart_bytes:
                return self._put(full, data.read_bytes())
            return self._send(full, data)
        except OSError as error:
            what = data if isinstance(data, Path) else "the data"
            raise StoreError(f"{what}: can't be read, to become {key}: {error.strerror or error}") from error
        finally:
            if isinstance(data, Path):
                data.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        """The whole object; raises `ObjectNotFound`."""
        full = self._full(key)

        def get() -> bytes:
            body: bytes = self._client.get_object(Bucket=self.bucket, Key=full)["Body"].read()
            return body

        try:
            return self._connection.run("read it", self.locate(key), get)
        except MissingObject as error:
            raise self._not_found(key) from error

    def open(self, key: str) -> BinaryIO:
        """A seekable, buffered stream over the object; raises `ObjectNotFound`."""
        try:
            state, _ = head_object(self._connection, self.bucket, self._full(key))
        except MissingObject as error:
            raise self._not_found(key) from error

        def lost(error: MissingObject | ConditionFailed) -> Exception:
            if isinstance(error, MissingObject):
                return self._not_found(key)
            return StoreError(f"{self.locate(key)}: was replaced while it was read; open it again")

        return open_snapshot(self._connection, state, lost)

    def info(self, key: str) -> ObjectInfo | None:
        """Size of an object, or None if there is none."""
        try:
            state, _ = head_object(self._connection, self.bucket, self._full(key))
        except MissingObject:
            return None
        return ObjectInfo(key, state.size)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix`, in key order, after `after`; holds one page of at most 1,000 at a
        time."""
        check_prefix(prefix)
        return self._list(prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        """Prefixes directly below `prefix`, in order."""
        check_prefix(prefix)
        return self._folders(prefix)

    def delete(self, key: str) -> None:
        """Delete the object if it exists. A bucket with versioning retains this version; expire old ones by a rule."""
        full = self._full(key)
        self._writable()
        delete(self._connection, self.bucket, full)

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite atomically: only for caches."""
        full = self._full(key)
        self._writable()
        encryption = self._connection.settings.encryption_arguments()
        self._connection.run(
            "write it",
            self.locate(key),
            lambda: self._client.put_object(Bucket=self.bucket, Key=full, Body=data, **encryption),
        )

    def locate(self, key: str) -> str:
        """The object's URL."""
        return join_url(self.bucket, self.prefix + key)

    def abort_stale_uploads(self, before: datetime) -> int:
        """Abort unfinished uploads of large objects that were started before that moment; returns their number."""
        self._writable()
        return abort_stale(self._connection, self.bucket, self.prefix, before)

    def close(self) -> None:
        """Remove this store's scratch folder."""
        if self._private is not None:
            private, self._private = self._private, None
            private.close()

    def __enter__(self) -> S3Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _put(self, full: str, body: bytes) -> bool:
        write = partial(put, self._connection, self.bucket, full, body=body)
        return write_once(self._connection, self.bucket, full, lambda attempt: write(attempt=attempt))

    def _send(self, full: str, source: Path) -> bool:
        if not self._parts_probed:
            probe_parts(self._connection, self.bucket, self.prefix, self._writable().new_path())
            self._parts_probed = True
        write = partial(send, self._connection, self.bucket, full, source=source)
        return write_once(self._connection, self.bucket, full, lambda attempt: write(attempt=attempt))

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        behind = {"StartAfter": self.prefix + after} if after else {}
        for page in self._pages(prefix, **behind):
            for found in page.get("Contents", []):
                key = found["Key"].removeprefix(self.prefix)
                if is_object_name(key):  # foreign keys, such as the "folders" that consoles create, are no objects
                    yield ObjectInfo(key, int(found["Size"]))

    def _folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages(prefix, Delimiter="/"):
            for found in page.get("CommonPrefixes", []):
                folder = found["Prefix"].removeprefix(self.prefix)
                if is_object_name(folder.rstrip("/")):
                    yield folder

    def _pages(self, prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, Any] = {}
        while True:
            page = self._page(self.prefix + prefix, **more, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _page(self, full_prefix: str, retry_timeout_seconds: float | None = None, **more: Any) -> dict[str, Any]:
        def get() -> dict[str, Any]:
            page: dict[str, Any] = self._client.list_objects_v2(Bucket=self.bucket, Prefix=full_prefix, **more)
            return page

        return self._connection.run(
            "list it", join_url(self.bucket, full_prefix), get, retry_timeout_seconds=retry_timeout_seconds
        )

    def _full(self, key: str) -> str:
        full = self.prefix + check_key(key)
        if len(full.encode()) > MAX_KEY_BYTES:
            raise StoreError(f"object key {full!r}: is longer than {MAX_KEY_BYTES} bytes; use a shorter prefix")
        return full

    def _writable(self) -> PrivateFolder:
        if self._private is None:
            raise StoreError(f"{self.locate('')}: this store was opened for reading only, or is closed")
        return self._private

    def _not_found(self, key: str) -> ObjectNotFound:
        return ObjectNotFound(f"{self.locate(key)}: no such object")


def _private_folder(scratch: Path | None) -> PrivateFolder:
    """A private folder below `scratch`, or below this user's folder in the system's folder for temporary files. Private
    folders of dead owners are swept."""
    root = scratch or Path(tempfile.gettempdir()) / f"tokenmill-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, parents=scratch is not None, exist_ok=True)
        status = root.lstat()
        if scratch is None and (not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()):
            raise StoreError(f"{root}: belongs to another user; set a scratch folder of your own")
        private = PrivateFolder(root, LOCAL_DISK)
        private.sweep_dead()
    except OSError as error:
        raise StoreError(f"{root}: can't be used for temporary files: {error.strerror or error}") from error
    return private
