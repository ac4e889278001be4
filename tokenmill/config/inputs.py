"""Inputs of the commands that compute on this machine: local files and folders, and objects in S3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.inputs.open import PinnedInput, open_pinned, pin_uri
from schemas.jobs.inputs import InputRef
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.planner import SourceFile

S3: Final = "s3://"


def pin(given: str, known: InputRef | None = None) -> InputRef:
    """Pin the input at the path or s3:// URL; see `pin_uri`."""
    if in_s3(given):
        return pin_uri(given, s3=_connection())
    return pin_uri(given if "://" in given else str(Path(given).expanduser()), known)


def open_input(pinned: InputRef) -> PinnedInput:
    """The pinned input, ready to be read; see `open_pinned`."""
    return open_pinned(pinned, _connection() if any(in_s3(file.uri) for file in pinned.files) else None)


def s3_files(url: str) -> list[SourceFile]:
    """The objects at the URL or pattern; see `find_s3_files`."""
    from pipeline.inputs.s3 import find_s3_files

    return find_s3_files(url, _connection())


def in_s3(uri: str) -> bool:
    """Whether the URI is an object or a prefix in S3."""
    return uri.lower().startswith(S3)


def _connection() -> S3Connection:
    from tokenmill.root import s3_connection

    return s3_connection(read_settings())
