"""`s3://bucket/key`: taking it apart, and refusing what holds a secret without showing it."""

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
    """Bucket and key (or prefix; perhaps "") of an S3 URL, taken as they stand: a key may hold "?", "#" and "%".

    Raises:
        StoreError: it is none, or carries credentials or a signature, which would end up in papers and logs.
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
    """Enough of the URL to find it again: no user, no query."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url.partition("?")[0]
    place = rest.partition("?")[0]
    host, slash, path = place.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
