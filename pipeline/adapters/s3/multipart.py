"""Multipart upload of a large file as one object, which is created when the upload is completed, if the key is free.

A failed upload is aborted. The upload of a killed sender stays on the server, invisible but charged for, until
`abort_stale` or a rule of the bucket aborts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from botocore.exceptions import ClientError

from pipeline.adapters.s3.client import MissingObject, S3Connection, code_of, status_of
from pipeline.adapters.s3.url import join_url
from pipeline.ports import StoreError

logger = structlog.get_logger(__name__)

MAX_PARTS: Final = 10_000
_CONFLICTS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})


class UploadConflict(Exception):
    """Raised when another writer was completing the same key, or the upload is gone: upload again if the key is
    free."""


def upload_parts(connection: S3Connection, bucket: str, key: str, source: Path, arguments: dict[str, Any]) -> None:
    """Create the object from the file, if there is none.

    Args:
        arguments: for the upload's start: metadata, encryption.

    Raises:
        ConditionFailed: the key is taken.  UploadConflict: it may be taken; check, and upload again.
        StoreError: the upload failed.  OSError: the file can't be read.
    """
    client, where = connection.client, join_url(bucket, key)
    target = {"Bucket": bucket, "Key": key}
    started = connection.run("start an upload", where, lambda: client.create_multipart_upload(**target, **arguments))
    target["UploadId"] = started["UploadId"]
    try:
        parts = _send(connection, target, where, source)
        _complete(connection, target, where, parts)
    except BaseException:
        _abort(connection, target, where)
        raise


def abort_stale(connection: S3Connection, bucket: str, prefix: str, before: datetime) -> int:
    """Abort uncompleted uploads below `prefix` that were started before that moment; returns their number."""
    aborted = 0
    for upload in _uploads(connection, bucket, prefix):
        if upload["Initiated"] < before:
            _abort(
                connection,
                {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]},
                join_url(bucket, upload["Key"]),
            )
            aborted += 1
    return aborted


def _send(connection: S3Connection, target: dict[str, Any], where: str, source: Path) -> list[dict[str, Any]]:
    """Send all parts, `part_threads` at once; returns the arguments for completion. Holds so many parts in memory."""
    size = source.stat().st_size
    part_bytes = max(connection.settings.part_bytes, -(-size // MAX_PARTS))

    def send(number: int) -> dict[str, Any]:
        with source.open("rb") as stream:
            stream.seek((number - 1) * part_bytes)
            data = stream.read(part_bytes)
        answer = connection.run(
            f"send part {number} of it",
            where,
            lambda: connection.client.upload_part(**target, PartNumber=number, Body=data),
        )
        checksums = {
            name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"
        }
        return {"PartNumber": number, "ETag": answer["ETag"]} | checksums

    with ThreadPoolExecutor(connection.settings.part_threads) as pool:
        sending = [pool.submit(send, number) for number in range(1, -(-size // part_bytes) + 1)]
        try:
            return [part.result() for part in sending]
        except BaseException:
            for part in sending:
                part.cancel()
            raise


def _complete(connection: S3Connection, target: dict[str, Any], where: str, parts: list[dict[str, Any]]) -> None:
    def complete() -> None:
        try:
            connection.client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
        except ClientError as error:
            if code_of(error) in _CONFLICTS or status_of(error) == 409:
                raise UploadConflict(code_of(error)) from error
            raise

    try:
        connection.run("complete an upload", where, complete)
    except MissingObject as error:  # also when an earlier attempt succeeded, and only its answer was lost
        raise UploadConflict("the upload is gone") from error


def _abort(connection: S3Connection, target: dict[str, Any], where: str) -> None:
    """Abort the upload, best effort: a failure must not hide why the upload failed. Not retried."""
    try:
        connection.run(
            "abort an upload",
            where,
            lambda: connection.client.abort_multipart_upload(**target),
            retry_timeout_seconds=0.0,
        )
    except MissingObject:
        return
    except StoreError as error:
        logger.warning("unfinished_upload_left", url=where, reason=str(error))


def _uploads(connection: S3Connection, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    request: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    while True:
        page = connection.run(
            "list unfinished uploads",
            join_url(bucket, prefix),
            partial(connection.client.list_multipart_uploads, **request),
        )
        yield from page.get("Uploads", [])
        if not page.get("IsTruncated"):
            return
        request |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
