"""Locks that end with their owner: `flock` on an open file. The kernel frees it when the process ends, however it ends,
so a lock is never stale and never taken over. The file itself stays: removing it would let two owners in."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from pipeline.ports import OutputLocked, StoreError


def try_lock(path: Path) -> int | None:
    """Open (creating) and lock the file; its descriptor, or None when another holds it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class RunLock:
    """One run at a time holds an output folder. Used as a context manager.

    Raises:
        OutputLocked: another process (named when known) holds it.
        StoreError: the folder can't be written or doesn't support locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock at once or raise; never waits."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = try_lock(self.path)
        except OSError as error:
            raise StoreError(
                f"{self.path.parent}: can't lock the output: {error.strerror}; choose a folder that you can write to"
            ) from error
        if descriptor is None:
            raise OutputLocked(
                f"{self.path.parent}: {self._owner()} is running there; wait for it, stop it, or choose another output"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it back; harmless when it isn't held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _owner(self) -> str:
        try:
            words = self.path.read_text().split()
        except (OSError, UnicodeDecodeError):
            words = []
        if len(words) == 2 and words[0].isdigit():
            return f"another run (pid {words[0]} on {words[1]})"
        return "another run"
