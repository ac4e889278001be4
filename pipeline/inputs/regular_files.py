"""Opens files that users name or upload: regular files only, and without blocking.

Opening a FIFO blocks until a writer opens it, which may never happen, and reading a device may never end. In a folder
that others may write to, a link would let them read files that only this process may read.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

from pipeline.ports import PipelineError

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class IrregularFile(PipelineError):
    """Raised when a file to read is a link, a FIFO, a device or a folder."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, also through links. Raises `IrregularFile`, and `OSError` when it can't be opened."""
    return _checked(path, _open(path, path))


def open_regular_below(folder: Path, path: Path) -> BufferedReader:
    """Open a regular file below `folder`; no part of the path from there on may be a link, even if it is exchanged
    meanwhile.

    Raises:
        IrregularFile: it is no regular file, or the path contains a link.  OSError: it can't be opened.
    """
    *folders, last = path.relative_to(folder).parts
    at = os.open(folder, _FLAGS | os.O_DIRECTORY)
    try:
        for name in folders:
            inner = _open_at(path, at, name, os.O_DIRECTORY)
            os.close(at)
            at = inner
        return _checked(path, _open_at(path, at, last))
    finally:
        os.close(at)


def _open_at(path: Path, folder: int, name: str, more: int = 0) -> int:
    try:
        return _open(path, name, os.O_NOFOLLOW | more, folder)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(name, folder)):
            raise IrregularFile(f"{path}: is a symbolic link, or lies below one; put the file itself there") from error
        raise


def _open(path: Path, name: str | Path, more: int = 0, folder: int | None = None) -> int:
    try:
        return os.open(name, _FLAGS | more, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _irregular(path) from error
        raise


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _checked(path: Path, descriptor: int) -> BufferedReader:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _irregular(path)
    return os.fdopen(descriptor, "rb")


def _irregular(path: Path) -> IrregularFile:
    return IrregularFile(f"{path}: is no regular file, but a folder, a FIFO, a socket or a device; put a file there")
