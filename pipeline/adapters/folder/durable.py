"""Durable changes of files in a folder. A name is reliable after a power cut once the file's bytes are synced, then the
folder that contains it, then each folder that was created on the way.

All changes go through a `Disk`, so that the simulator can end a process between any two of them, and undo unsynced
changes. Reading needs no such interface.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Protocol

from pipeline.adapters.folder.locks import try_lock


class Disk(Protocol):
    """Changes of files below a folder. All raise OSError."""

    def new_name(self) -> str:
        """An unused file name; also safe after a fork."""
        ...

    def write_new(self, path: Path, data: bytes) -> None:
        """Write a file that must not exist; not synced. The mode follows the umask."""
        ...

    def sync_file(self, path: Path) -> None:
        """Wait until the file's bytes are on the disk."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's names (created, linked, removed) are on the disk."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name; raises FileExistsError when the name is taken."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Move the file, over another one if need be."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name; raises FileNotFoundError when it isn't there."""
        ...

    def make_folder(self, path: Path) -> None:
        """Make the folder, unless it is there."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove the folder with its contents, as far as possible."""
        ...

    def lock(self, path: Path) -> int | None:
        """See `locks.try_lock`."""
        ...

    def unlock(self, descriptor: int) -> None:
        """Release the lock."""
        ...


class LocalDisk:
    """The operating system's disk.

    Args:
        mask: maximum permissions of files and folders; the umask removes further ones.
    """

    def __init__(self, mask: int = 0o777) -> None:
        self._mask = mask

    def new_name(self) -> str:
        """The process id, and 64 random bits."""
        return f"{os.getpid()}-{secrets.token_hex(8)}"

    def write_new(self, path: Path, data: bytes) -> None:
        """See `Disk`."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 & self._mask)
        with open(descriptor, "wb") as stream:
            stream.write(data)

    def sync_file(self, path: Path) -> None:
        """See `Disk`."""
        _sync(path, os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """See `Disk`."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        mode = stat.S_IMODE(os.stat(source).st_mode)  # of a file that was built elsewhere
        if mode & ~self._mask:
            os.chmod(source, mode & self._mask)
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """See `Disk`."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        path.mkdir(mode=self._mask, exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        """See `Disk`."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """See `Disk`."""
        shutil.rmtree(path, ignore_errors=True)

    def lock(self, path: Path) -> int | None:
        """See `Disk`."""
        return try_lock(path)

    def unlock(self, descriptor: int) -> None:
        """See `Disk`."""
        os.close(descriptor)


LOCAL_DISK = LocalDisk()
"""A shared instance: it holds no state."""


def private_disk(root: Path) -> LocalDisk:
    """A disk for a folder that only its owner may read, or also its group, if that may already write to it."""
    shared = root.is_dir() and root.stat().st_mode & stat.S_IWGRP
    return LocalDisk(0o770 if shared else 0o700)


def make_folders(disk: Disk, path: Path, *, below: Path) -> None:
    """Create `path` and its parents under `below` (which exists), each durably.

    Existing folders are synced too: another process may have created them without having synced yet.
    """
    missing = path.relative_to(below).parts
    folder = below
    for part in missing:
        parent, folder = folder, folder / part
        disk.make_folder(folder)
        disk.sync_folder(parent)


def write_durably(disk: Disk, path: Path, data: bytes) -> None:
    """Write a new private file, and wait until its bytes are on the disk."""
    disk.write_new(path, data)
    disk.sync_file(path)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
