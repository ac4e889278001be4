"""A simulated disk that loses data which was not synced.

The files are in a real folder (in memory, where the machine has one), so the store's reads are real. Recorded next to
them is what a power cut may take back: bytes of files never synced, and names that appeared or
vanished since their folder was last synced. Each may be lost alone: POSIX promises no order.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.adapters.folder.locks import try_lock
from tests.simulation.machine import Process


@dataclass(eq=False)
class _File:
    """A file's bytes, under however many names. `synced`: they survive a power cut."""

    synced: bool = False


@dataclass(frozen=True, eq=False)
class _UnsyncedRemoval:
    """A file whose removal is not synced; `stored_at` has its bytes."""

    stored_at: Path
    file: _File


class Device:
    """What all processes of the machine share of a disk.

    Args:
        root: the folder that is simulated.  attic: where removed files lie until their removal is synced.
    """

    def __init__(self, root: Path, attic: Path, chance: random.Random) -> None:
        self.root = root
        self.full = 0  # writes that find no space
        self._attic = attic
        self._chance = chance
        self._files: dict[Path, _File] = {}
        self._before: dict[
            Path, dict[str, _UnsyncedRemoval | None]
        ] = {}  # folder -> name -> what it was when last synced
        self._count = 0

    def appears(self, path: Path, file: _File | None = None) -> None:
        """A name is there now that was not."""
        if file is not None:
            self._files[path] = file
        self._before.setdefault(path.parent, {}).setdefault(path.name, None)

    def file(self, path: Path) -> _File:
        """The file behind a name; one that was made behind this disk's back is not synced."""
        return self._files.setdefault(path, _File())

    def vanishes(self, path: Path) -> None:
        """Remove a name; raises FileNotFoundError."""
        changes = self._before.setdefault(path.parent, {})
        file = self._files.pop(path, None) or _File(synced=True)
        if path.name in changes:
            path.unlink()
            if changes[path.name] is None:
                del changes[path.name]
            return
        self._count += 1
        stored_at = self._attic / str(self._count)
        path.rename(stored_at)
        changes[path.name] = _UnsyncedRemoval(stored_at, file)

    def moves(self, source: Path, target: Path) -> None:
        """Rename, over another file if need be."""
        file = self.file(source)
        if target.exists():
            self.vanishes(target)
        source.rename(target)
        self.appears(target, file)
        del self._files[source]
        self.appears(source)

    def forget(self, folder: Path) -> None:
        """A folder was removed with all that was in it."""
        self._files = {path: file for path, file in self._files.items() if not path.is_relative_to(folder)}
        self._before = {path: names for path, names in self._before.items() if not path.is_relative_to(folder)}

    def synced(self, folder: Path) -> None:
        """The folder's names are on the disk."""
        for gone in self._before.pop(folder, {}).values():
            if gone is not None:
                gone.stored_at.unlink()

    def unsynced(self, folder: Path) -> set[str]:
        """Names in `folder` that a power cut may take back; all, when it may take the folder itself."""
        above = folder
        while above != self.root.parent:
            if above.name in self._before.get(above.parent, {}):
                return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
            above = above.parent
        return set(self._before.get(folder, {}))

    def cut_power(self) -> None:
        """Lose what was not synced, or some of it."""
        for folder, names in sorted(self._before.items()):
            for name, before in names.items():
                if folder.is_dir() and self._chance.random() < 0.5:
                    self._restore(folder / name, before)
        for path, file in sorted(self._files.items()):
            if not file.synced and path.is_file():
                self._tear(path)
                file.synced = True
        self._before.clear()
        self._files = {path: file for path, file in self._files.items() if path.exists()}

    def _restore(self, path: Path, before: _UnsyncedRemoval | None) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if before is not None:
            before.stored_at.rename(path)
            self._files[path] = before.file

    def _tear(self, path: Path) -> None:
        """Bytes that were not synced: all there, cut off, or zeros."""
        size = path.stat().st_size
        how = self._chance.randrange(4)
        left = (size, 0, self._chance.randint(0, size), self._chance.randint(0, size))[how]
        with path.open("r+b") as stream:
            stream.truncate(left)
            if how == 3:
                stream.truncate(size)


class ProcessDisk:
    """`Disk` as one life of a process sees it: it may end between any two calls, and in the middle of a write."""

    def __init__(self, device: Device, process: Process) -> None:
        self._device = device
        self._process = process
        self._root = str(device.root)
        self._prefix = f"{process.name}-{process.life}"
        self._names = 0

    def new_name(self) -> str:
        self._names += 1
        return f"{self._prefix}-{self._names}"

    def write_new(self, path: Path, data: bytes) -> None:
        self._point("write_new", path)
        with path.open("xb", buffering=0) as stream:
            self._device.appears(path, _File())
            stream.write(data[: len(data) // 2])
            self._point("write_more", path)
            self._need_space()
            stream.write(data[len(data) // 2 :])

    def sync_file(self, path: Path) -> None:
        self._point("sync_file", path)
        path.stat()
        self._need_space()  # where space is allocated late, a file that was written may still find none
        self._device.file(path).synced = True

    def sync_folder(self, path: Path) -> None:
        self._point("sync_folder", path)
        path.stat()
        self._device.synced(path)

    def link(self, source: Path, target: Path) -> None:
        self._point("link", target)
        self._need_space()
        os.link(source, target)
        self._device.appears(target, self._device.file(source))

    def rename(self, source: Path, target: Path) -> None:
        self._point("rename", target)
        self._device.moves(source, target)

    def unlink(self, path: Path) -> None:
        self._point("unlink", path)
        self._device.vanishes(path)

    def make_folder(self, path: Path) -> None:
        self._point("make_folder", path)
        if not path.is_dir():
            self._need_space()
            path.mkdir()
            self._device.appears(path)

    def remove_folder(self, path: Path) -> None:
        self._point("remove_folder", path)
        path.rmdir()
        self._device.forget(path)

    def remove_tree(self, path: Path) -> None:
        self._point("remove_tree", path)
        shutil.rmtree(path, ignore_errors=True)
        self._device.forget(path)

    def lock(self, path: Path) -> int | None:
        self._point("lock", path)
        new = not path.exists()
        descriptor = try_lock(path)
        if new:
            self._device.appears(path, _File(synced=True))
        if descriptor is not None:
            self._process.open_files.add(descriptor)
        return descriptor

    def unlock(self, descriptor: int) -> None:
        self._point("unlock", Path())
        self._process.open_files.discard(descriptor)
        os.close(descriptor)

    def _need_space(self) -> None:
        if self._device.full:
            self._device.full -= 1
            self._process.troubled = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _point(self, call: str, path: Path) -> None:
        self._process.point(f"disk.{call}", str(path).removeprefix(self._root))
