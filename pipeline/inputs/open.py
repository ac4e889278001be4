"""Opening of inputs by the scheme of their URI: a local path, or `s3://bucket/key`. Both are pinned once, and read as
pinned.

Other URIs (a presigned URL, another store) are refused here, before they get into a job's records.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.inputs.pinning import WatchedInput, pin_input
from pipeline.planner.ports import InputError, SourceFile
from schemas.jobs.inputs import InputRef

if TYPE_CHECKING:
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.adapters.s3.settings import S3Settings

Pin = Callable[[str], InputRef]
"""Pins the current version of a URI's input. Raises `InputError` when there is no input."""


class PinnedInput(Protocol):
    """A pinned input while it is read."""

    def files(self) -> list[SourceFile]:
        """The files, to be opened as seekable streams; opening or reading one that changed raises `InputError`."""
        ...

    def check(self) -> None:
        """Raise `InputError` when the bytes read may not be the pinned ones."""
        ...


def pin_uri(uri: str, known: InputRef | None = None, s3: S3Connection | S3Settings | None = None) -> InputRef:
    """Pin the current input at the URI: its files with their sizes, and with stamps, hashes, versions or ETags.

    Args:
        uri: a path, s3://bucket/key, or s3://bucket/prefix/.
        known: an earlier pinning; a local file that seems unchanged is not hashed again.
        s3: how to reach S3; None: as AWS's tools would.

    Raises:
        InputError: it is missing, can't be read, contains no input, or the URI can't name one.
        StoreError: S3 can't be used, or the URL carries credentials.
    """
    if _is_s3(uri):
        from pipeline.inputs.s3 import pin_s3_input  # noqa: PLC0415 - boto3 comes with an extra, and takes time

        return pin_s3_input(uri, s3)
    return pin_input(Path(uri), known)


def open_pinned(
    pinned: InputRef, s3: S3Connection | S3Settings | None = None, on_read: Callable[[], None] | None = None
) -> PinnedInput:
    """Open a pinned input for reading; see `pin_uri` for `s3` and errors. `on_read` is called after each read, on the
    reading thread."""
    schemes = {_is_s3(file.uri) for file in pinned.files}
    if len(schemes) > 1:
        raise InputError(f"{pinned.uri}: mixes files of S3 and of this machine; submit them as two jobs")
    if schemes.pop():
        from pipeline.inputs.s3 import PinnedS3Input  # noqa: PLC0415 - as above

        return PinnedS3Input(pinned, s3, on_read)
    return WatchedInput(pinned, on_read)


def _is_s3(uri: str) -> bool:
    """Whether the URI is in S3; raises `InputError` for a URI that is neither in S3 nor a path."""
    scheme, mark, rest = uri.partition("://")
    if not mark or "/" in scheme:
        return False
    if scheme.lower() == "s3":
        return True
    host = rest.partition("?")[0].partition("#")[0].partition("/")[0].rpartition("@")[2]
    hint = "a presigned URL would leave its signature in the job's records: " if "?" in rest else ""
    raise InputError(
        f"{scheme}://{host}/…: inputs come from a path or from s3://bucket/key; {hint}give the object's s3:// URL"
    )
