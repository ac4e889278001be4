"""Inputs by the scheme of their URI: a local path, or `s3://bucket/key`. Both are pinned once, and read as pinned.

What else names an input (a presigned URL, another store) is refused here, before it gets into a job's papers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.inputs.pinning import WatchedInput, pin_input
from pipeline.planner.api import InputError, SourceFile
from schemas.jobs.inputs import InputRef

if TYPE_CHECKING:
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.adapters.s3.settings import S3Settings

Pin = Callable[[str], InputRef]
"""From a URI to what lies there now. Raises `InputError` when nothing that is an input does."""


class PinnedInput(Protocol):
    """A pinned input while it is read."""

    def files(self) -> list[SourceFile]:
        """The files, to be opened as seekable streams; opening or reading one that changed raises `InputError`."""
        ...

    def check(self) -> None:
        """Raises `InputError` when what was read may not be what was pinned."""
        ...


def pin_uri(uri: str, known: InputRef | None = None, s3: S3Connection | S3Settings | None = None) -> InputRef:
    """What lies at the URI now: its files with their sizes, and what tells them from later ones.

    Args:
        uri: a path, s3://bucket/key, or s3://bucket/prefix/.
        known: an earlier pinning; a local file that seems unchanged is not hashed again.
        s3: how to reach S3; None: as AWS's tools would.

    Raises:
        InputError: it is missing, can't be read, holds nothing that is an input, or the URI can't name one.
        StoreError: S3 can't be used, or the URL carries credentials.
    """
    if _is_s3(uri):
        from pipeline.inputs.s3 import pin_s3_input  # noqa: PLC0415 - boto3 comes with an extra, and takes time

        return pin_s3_input(uri, s3)
    return pin_input(Path(uri), known)


def open_pinned(
    pinned: InputRef, s3: S3Connection | S3Settings | None = None, on_read: Callable[[], None] | None = None
) -> PinnedInput:
    """The pinned input, ready to be read; see `pin_uri` for `s3` and errors. `on_read` is called whenever some of it
    was read, on the thread that reads."""
    schemes = {_is_s3(file.uri) for file in pinned.files}
    if len(schemes) > 1:
        raise InputError(f"{pinned.uri}: mixes files of S3 and of this machine; submit them as two jobs")
    if schemes.pop():
        from pipeline.inputs.s3 import PinnedS3Input  # noqa: PLC0415 - as above

        return PinnedS3Input(pinned, s3, on_read)
    return WatchedInput(pinned, on_read)


def _is_s3(uri: str) -> bool:
    """Raises `InputError` for what is neither in S3 nor a path."""
    scheme, mark, rest = uri.partition("://")
    if not mark or "/" in scheme:
        return False
    if scheme.lower() == "s3":
        return True
    place = rest.partition("?")[0].partition("#")[0].partition("/")[0].rpartition("@")[2]
    hint = "a presigned URL would leave its signature in the job's papers: " if "?" in rest else ""
    raise InputError(
        f"{scheme}://{place}/…: inputs come from a path or from s3://bucket/key; {hint}give the object's s3:// URL"
    )
