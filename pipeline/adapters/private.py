"""A process's own corner of a store's folder, for files that are still being built.

Each owner has `.tmp/NAME/` and holds a lock on `.tmp/NAME.lock` as long as it lives. Whoever opens the store later may
remove the corner of any owner whose lock is free: that owner is dead, so nothing there can still become an object.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from pipeline.adapters.locks import try_lock

FOLDER = ".tmp"


class PrivateFolder:
    """Owns `root/.tmp/NAME/` until `close`. Raises OSError when the folder can't be made or locked."""

    def __init__(self, root: Path) -> None:
        self._shared = root / FOLDER
        self._lock_path, self._descriptor = self._take_lock()
        self.path = self._lock_path.with_suffix("")
        self.path.mkdir()

    def new_path(self) -> Path:
        """A name that nobody has used; also safe after a fork."""
        return self.path / f"{os.getpid()}-{secrets.token_hex(8)}"

    def sweep_dead(self) -> int:
        """Remove what dead owners left behind; the number of owners swept."""
        swept = 0
        for lock_path in sorted(self._shared.glob("*.lock")):
            if lock_path == self._lock_path:
                continue
            try:
                descriptor = try_lock(lock_path)
            except FileNotFoundError:  # the last of the others closed just now and took the folder along
                continue
            if descriptor is None:
                continue
            try:
                shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                swept += 1
            finally:
                os.close(descriptor)
        return swept

    def close(self) -> None:
        """Remove the corner and, when it was the last, the folder around it."""
        if self._descriptor < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1
        with contextlib.suppress(OSError):  # others are there, or have just removed it
            self._shared.rmdir()

    def _take_lock(self) -> tuple[Path, int]:
        while True:
            path = self._shared / f"{os.getpid()}-{secrets.token_hex(8)}.lock"
            with contextlib.suppress(FileExistsError):
                self._shared.mkdir()
            try:
                descriptor = try_lock(path)
            except FileNotFoundError:  # an owner that closed took the empty folder along
                continue
            if descriptor is None:
                continue
            # A sweeper may have met the file between its creation and our lock and have removed it.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return path, descriptor
            os.close(descriptor)
