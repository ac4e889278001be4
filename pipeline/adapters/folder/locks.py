"""Locks that end with their owner: `flock` on an open file. The kernel releases a lock when the process and all
processes that inherited the open file end, in any way, so a lock is never stale and never taken over. The file itself
stays: removing it would admit two owners."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from pipeline.ports import OutputLocked, StoreError

RETRY_TIMEOUT_SECONDS: Final = 20.0
"""How long the processes of a killed run may take to end: they complete a write on a slow disk, and free memory."""

DYING_SECONDS: Final = 1.0
"""How long a process may take from the signal until the kernel marks it as ending."""

PF_EXITING: Final = 0x4
"""The kernel's flag of an ending process."""

POLL_SECONDS: Final = 0.02
LOCK_FILE: Final = ".lock"


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


def is_locked(folder: Path) -> bool:
    """Whether a run holds an output folder (`RunLock`); false where that can't be read."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True)
class _Owner:
    """The process that took a lock. `namespace`: the scope of its id, see `_pid_namespace`."""

    pid: int
    host: str
    namespace: str | None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def is_gone(self) -> bool:
        """Whether it has certainly ended, see `has_ended`."""
        if self.host != socket.gethostname() or self.namespace != _pid_namespace():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        try:
            return has_ended(Path(f"/proc/{self.pid}/stat").read_bytes())
        except OSError:  # no /proc on this system, or the process has just ended
            return False


def has_ended(stat: bytes) -> bool:
    """Whether a process has ended, by its `/proc/PID/stat`: it is a zombie, or the kernel is freeing its memory
    (measured: a second for four gigabytes) before it closes its files."""
    fields = stat.rpartition(b")")[2].split()  # after the name, which may contain anything: state, …, flags (the 7th)
    return len(fields) > 6 and (fields[0] in (b"Z", b"X") or bool(int(fields[6]) & PF_EXITING))


def _pid_namespace() -> str | None:
    """The namespace of process ids: containers of one host name may have ids of their own. None if there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


class RunLock:
    """The lock of an output folder, for one run at a time. Used as a context manager.

    A process that inherits `descriptor` holds the folder too: it is free only when both have ended. So a killed run may
    still hold it through its child processes; these end by themselves, and `acquire` waits for them.

    Args:
        retry_timeout_seconds: for the processes of a killed run. For a live run it is `DYING_SECONDS` at most:
            right after `kill -9` a process still exists.

    Raises:
        OutputLocked: another process (named when known) holds it.
        StoreError: the folder can't be written or doesn't support locks.
    """

    def __init__(self, folder: Path, retry_timeout_seconds: float = RETRY_TIMEOUT_SECONDS) -> None:
        self.path = folder / LOCK_FILE
        self._retry_timeout_seconds = retry_timeout_seconds
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The descriptor of the locked file, for a child process; only while the lock is held."""
        if self._descriptor is None:
            raise ValueError(f"{self.path}: is not locked")
        return self._descriptor

    def acquire(self) -> None:
        """Take the lock, or raise."""
        began = time.monotonic()
        while (descriptor := self._try()) is None:
            owner, waited = self._owner(), time.monotonic() - began
            if owner is not None and owner.is_gone():
                if waited >= self._retry_timeout_seconds:
                    raise OutputLocked(
                        f"{self.path.parent}: a run that was killed ({owner}) has left a process that is still ending; "
                        "wait a moment and run again"
                    )
            elif waited >= min(self._retry_timeout_seconds, DYING_SECONDS):
                raise OutputLocked(
                    f"{self.path.parent}: another run{'' if owner is None else f' ({owner})'} is running there; "
                    "wait for it, stop it, or choose another output"
                )
            time.sleep(POLL_SECONDS)
        os.ftruncate(descriptor, 0)
        words = (str(os.getpid()), socket.gethostname(), _pid_namespace() or "")
        os.pwrite(descriptor, f"{' '.join(words).rstrip()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; harmless when it isn't held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _try(self) -> int | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return try_lock(self.path)
        except OSError as error:
            raise StoreError(
                f"{self.path.parent}: can't lock the output: {error.strerror}; choose a folder that you can write to"
            ) from error

    def _owner(self) -> _Owner | None:
        """The process that took the lock, if the lock file names it."""
        try:
            words = self.path.read_text().split()
        except (OSError, UnicodeDecodeError):
            return None
        if len(words) not in (2, 3) or not words[0].isdigit():
            return None
        return _Owner(int(words[0]), words[1], words[2] if len(words) == 3 else None)
