"""What must happen before a name on a disk can be trusted after a power cut: the file's bytes synced, then the folder
that names it, then each folder that was made on the way."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Wait until the folder's names (created, linked, removed) are on the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folders(path: Path, *, below: Path) -> None:
    """Make `path` and its parents under `below` (which exists), each durably.

    Folders that exist already are synced too: another process may have made them and not have come to the sync yet.
    """
    missing = path.relative_to(below).parts
    folder = below
    for part in missing:
        parent, folder = folder, folder / part
        folder.mkdir(exist_ok=True)
        sync_folder(parent)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that nobody else knows yet and sync its bytes. The mode follows the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with open(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
