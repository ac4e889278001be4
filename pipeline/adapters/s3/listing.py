"""Listing of a bucket, a page of at most 1,000 objects at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.url import join_url


def list_objects(
    connection: S3Connection, bucket: str, prefix: str, *, delimiter: str = ""
) -> Iterator[dict[str, Any]]:
    """The objects whose keys start with `prefix`, in key order, as S3's `Contents` has them.

    Args:
        delimiter: "/" for those directly below the prefix.

    Raises:
        StoreError: the bucket can't be used.
    """
    request: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    if delimiter:
        request["Delimiter"] = delimiter
    while True:
        list_page = partial(connection.client.list_objects_v2, **request)
        page = connection.run("list it", join_url(bucket, prefix), list_page)
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        request["ContinuationToken"] = page["NextContinuationToken"]
