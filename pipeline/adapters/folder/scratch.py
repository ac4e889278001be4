"""A process's private scratch folder inside a store's folder, for files that are still being built.

Each owner has `.tmp/NAME/` and holds a lock on `.tmp/NAME.lock` as long as it lives. A process that opens the store
later may remove the scratch folder of any owner whose lock is free: that owner is dead, so no file there can still
become an object.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pipeline.adapters.folder.durable import Disk

FOLDER = ".tmp"


class PrivateFolder:
    """Owns `root/.tmp/NAME/` until `close`. Raises OSError when the folder can't be made or locked."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._disk = disk
        self._shared = root / FOLDER
        self._lock_path, self._descriptor = self._take_lock()
        self.path = self._lock_path.with_suffix("")
        disk.make_folder(self.path)

    def new_path(self) -> Path:
        """An unused path; also safe after a fork."""
        return self.path / self._disk.new_name()

    def sweep_dead(self) -> int:
        """Remove the scratch folders of dead owners; returns the number of these owners."""
        swept = 0
        # A power cut may remove the lock file and leave the folder. An owner locks before it creates its folder.
        for name in sorted({path.name.removesuffix(".lock") for path in self._shared.iterdir()}):
            lock_path = self._shared / f"{name}.lock"
            if lock_path == self._lock_path:
                continue
            try:
                descriptor = self._disk.lock(lock_path)
            except FileNotFoundError:  # the last of the others has just closed and removed the folder
                continue
            if descriptor is None:
                continue
            try:
                self._disk.remove_tree(self._shared / name)
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(lock_path)
                swept += 1
            finally:
                self._disk.unlock(descriptor)
        return swept

    def close(self) -> None:
        """Remove the scratch folder and, when it was the last, its parent folder."""
        if self._descriptor < 0:
            return
        self._disk.remove_tree(self.path)
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self._lock_path)
        self._disk.unlock(self._descriptor)
        self._descriptor = -1
        with contextlib.suppress(OSError):  # others use it, or have just removed it
            self._disk.remove_folder(self._shared)

    def _take_lock(self) -> tuple[Path, int]:
        while True:
            path = self._shared / f"{self._disk.new_name()}.lock"
            self._disk.make_folder(self._shared)
            try:
                descriptor = self._disk.lock(path)
            except FileNotFoundError:  # an owner that closed has removed the empty folder
                continue
            if descriptor is None:
                continue
            # A sweeper may have found the file between its creation and the lock, and have removed it.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return path, descriptor
            self._disk.unlock(descriptor)
