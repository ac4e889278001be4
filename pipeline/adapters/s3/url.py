"""Parsing of `s3://bucket/key`; URLs that contain a secret are refused without showing it."""

from __future__ import annotations

import re
from typing import Final

from pipeline.ports import StoreError

SCHEME: Final = "s3://"
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_SECRETS: Final = re.compile(
    r"x-amz-(signature|credential|security-token)=|awsaccesskeyid=|[?&](signature|token|secret[a-z_-]*|password)=",
    re.IGNORECASE,
)


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key (or prefix; may be "") of an S3 URL, without decoding: a key may contain "?", "#" and "%".

    Raises:
        StoreError: it is no S3 URL, or contains credentials or a signature, which would get into records and logs.
    """
    if _SECRETS.search(url) or "@" in url.partition("://")[2].partition("/")[0]:
        raise StoreError(
            f"{_without_secrets(url)}: the URL carries credentials or a signature; "
            "give plain s3://bucket/key, and the credentials in the environment"
        )
    if not url.startswith(SCHEME):
        raise StoreError(f"{_without_secrets(url)}: is no S3 URL; give one such as s3://bucket/key")
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(f"{url}: {bucket!r} is no name of a bucket; give a URL such as s3://bucket/key")
    return bucket, key


def join_url(bucket: str, key: str) -> str:
    """`s3://bucket/key`."""
    return f"{SCHEME}{bucket}/{key}"


def _without_secrets(url: str) -> str:
    """The URL without user and query, for messages."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url.partition("?")[0]
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
