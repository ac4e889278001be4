"""Validation shared by several ingest sources, and the error for an invalid submission."""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from typing import Final
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

_SCHEMES: Final = ("s3", "file")


class InvalidSubmission(Exception):
    """Raised for a submission that is always refused, with a short, stable code and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_uri(uri: str, prefixes: Collection[str]) -> None:
    """Raises `InvalidSubmission` for a URI that isn't below one of `prefixes`, or that is ambiguous."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InvalidSubmission("bad_uri", f"uri {uri[:200]!r} is none: {error}") from None
    if parts.scheme not in _SCHEMES:
        raise InvalidSubmission("bad_uri", f"uri {uri[:200]!r} must begin with s3:// or file://")
    if parts.scheme == "file" and (
        parts.netloc or unquote(parts.path) != parts.path or posixpath.normpath(parts.path) != parts.path
    ):
        raise InvalidSubmission(
            "bad_uri", f"uri {uri[:200]!r} must be file:/// and an absolute path without . , .. or %"
        )
    if not any(uri.startswith(prefix) and uri != prefix for prefix in prefixes):
        allowed = ", ".join(prefixes) or "none is configured"
        raise InvalidSubmission(
            "forbidden_uri", f"uri {uri[:200]!r} is not below what this tenant may name ({allowed})"
        )


def first_mistake(error: ValidationError) -> str:
    """The first validation error of pydantic, with its location."""
    detail = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
