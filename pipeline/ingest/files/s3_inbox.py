"""An inbox on a prefix of a bucket.

An upload is not visible before it is complete. A version of an object is identified by its version id; in a bucket
without versioning, by its etag and the second of its upload. So the same bytes uploaded again are a new job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from pipeline.adapters.s3.client import MissingObject, S3Connection, code_of
from pipeline.adapters.s3.url import join_url
from pipeline.ingest.files.source import Entry, FileVersion, PinnedFile
from pipeline.ports import StoreError
from schemas.jobs.inputs import InputFile, InputFormat, InputRef

Answer = TypeVar("Answer")
_NO_VERSION = (None, "null")
"""Version ids of objects that were uploaded without versioning: they may be replaced."""
_NO_SUCH_VERSION = frozenset({"400", "405", "InvalidArgument", "MethodNotAllowed"})
"""Error codes of different servers for a delete marker or an unknown version."""
_RETRY_TIMEOUT_SECONDS = 10.0
"""Retry time-out of one operation. Failed files are retried later, so they needn't delay others for long."""


class BucketInbox:
    """`Inbox` on the objects below `prefix` of a bucket.

    Args:
        prefix: such as "incoming/".  tenant: the inbox's tenant.
    """

    kind = "bucket"

    def __init__(self, connection: S3Connection, bucket: str, prefix: str, tenant: str = "default") -> None:
        if not prefix.endswith("/"):
            raise StoreError(f"{join_url(bucket, prefix)}: an inbox's prefix ends in '/', such as incoming/")
        self._connection = connection
        self._client = connection.client
        self.bucket = bucket
        self.prefix = prefix
        self.tenant = tenant

    def entries(self) -> Iterator[Entry]:
        """All objects below the prefix, sorted by key."""
        request: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.prefix}
        while True:
            page = self._run("list", "", lambda: self._client.list_objects_v2(**request))
            for found in page.get("Contents", ()):
                stamp = _stamp(found["ETag"], found["LastModified"], found["Size"])
                yield Entry(found["Key"].removeprefix(self.prefix), found["Size"], stamp)
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def find(self, name: str, version: str | None = None) -> FileVersion | None:
        """See `Inbox`. A deleted object is gone, even if older versions of it exist."""
        head = self._head(name)
        if head is not None and version not in _NO_VERSION and version != head.get("VersionId"):
            head = self._head(name, version)  # it was replaced since
        if head is None:
            return None
        found = head.get("VersionId")
        return FileVersion(
            Entry(name, head["ContentLength"], _stamp(head["ETag"], head["LastModified"], head["ContentLength"])),
            modified=head["LastModified"],
            version=None if found in _NO_VERSION else found,
            etag=head["ETag"],
            metadata=head.get("Metadata", {}),
        )

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """See `Inbox`."""

        def get() -> bytes:
            with self._client.get_object(Bucket=self.bucket, Key=self.prefix + name)["Body"] as body:
                data: bytes = body.read(max_bytes)
                return data

        try:
            return self._run("read it", name, get)
        except MissingObject:
            return None

    def pin(self, drop: FileVersion, kind: InputFormat) -> PinnedFile:
        """See `Inbox`. All later reads are of this version, or fail when the etag differs."""
        key = self.prefix + drop.entry.name
        uri = self.uri(drop.entry.name)
        file = InputFile(uri=uri, size=drop.entry.size, version=drop.version, etag=drop.etag)
        if drop.version is not None:
            identity: tuple[str, ...] = (self.bucket, key, "version", drop.version)
        else:
            identity = (self.bucket, key, "etag", drop.etag or "", drop.modified.isoformat(timespec="seconds"))
        return PinnedFile(InputRef(uri=uri, format=kind, files=(file,)), identity)

    def uri(self, name: str) -> str:
        """See `Inbox`."""
        return join_url(self.bucket, self.prefix + name)

    def _head(self, name: str, version: str | None = None) -> dict[str, Any] | None:
        request = {"Bucket": self.bucket, "Key": self.prefix + name}
        if version is not None:
            request["VersionId"] = version

        def get() -> dict[str, Any] | None:
            try:
                answer: dict[str, Any] = self._client.head_object(**request)
            except ClientError as error:
                if version is not None and code_of(error) in _NO_SUCH_VERSION:
                    return None
                raise
            return answer

        try:
            return self._run("look at it", name, get)
        except MissingObject:
            return None

    def _run(self, what: str, name: str, action: Callable[[], Answer]) -> Answer:
        return self._connection.run(what, self.uri(name), action, retry_timeout_seconds=_RETRY_TIMEOUT_SECONDS)


def _stamp(etag: str, modified: datetime, size: int) -> str:
    """A stamp of facts that both a listing and a HEAD request return."""
    return f"{etag}|{int(modified.timestamp())}|{size}"
