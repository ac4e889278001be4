"""Locks that end with their owner: `flock` on an open file. The kernel frees it when the process ends, however it ends,
with all that it has handed the open file to, so a lock is never stale and never taken over. The file itself stays:
removing it would let two owners in."""

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

PATIENCE_SECONDS: Final = 20.0
"""What a killed run leaves ends soon, but not before a write that a slow disk has begun, nor before its memory is
freed."""

DYING_SECONDS: Final = 1.0
"""What a process may take from the signal until the kernel marks it as ending."""

PF_EXITING: Final = 0x4
"""The kernel's flag of a process that it is taking down."""

LOOK_SECONDS: Final = 0.02


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


@dataclass(frozen=True, slots=True)
class _Owner:
    """The process that took a lock. `namespace`: where its id means something, see `_pid_namespace`."""

    pid: int
    host: str
    namespace: str | None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def is_gone(self) -> bool:
        """Whether it surely runs no more, see `has_ended`."""
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
        except OSError:  # not on this system, or it ends just now
            return False


def has_ended(stat: bytes) -> bool:
    """Whether a process runs no more, by its `/proc/PID/stat`: nobody has waited for it yet (a zombie), or the kernel
    is freeing its memory (a second for four gigabytes, where it was measured) before it closes its files."""
    fields = stat.rpartition(b")")[2].split()  # behind the name, which may hold anything: state, …, flags (the 7th)
    return len(fields) > 6 and (fields[0] in (b"Z", b"X") or bool(int(fields[6]) & PF_EXITING))


def _pid_namespace() -> str | None:
    """Containers of one host name may have process ids of their own; None where the system has no such thing."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


class RunLock:
    """One run at a time holds an output folder. Used as a context manager.

    A process that is given `descriptor` holds the folder too: it is free only when both are gone. So a run that was
    killed may still be holding it, through what it had started; that ends by itself, and is waited for.

    Args:
        patience: seconds to wait for what a killed run has left. A run that lives gets as much of it as one takes to
            die: right after `kill -9` it is still there.

    Raises:
        OutputLocked: another process (named when known) holds it.
        StoreError: the folder can't be written or doesn't support locks.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE_SECONDS) -> None:
        self.path = folder / ".lock"
        self._patience = patience
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The file that is locked, for a process that is started; only while the lock is held."""
        if self._descriptor is None:
            raise ValueError(f"{self.path}: is not locked")
        return self._descriptor

    def acquire(self) -> None:
        """Take the lock or raise."""
        began = time.monotonic()
        while (descriptor := self._try()) is None:
            owner, waited = self._owner(), time.monotonic() - began
            if owner is not None and owner.is_gone():
                if waited >= self._patience:
                    raise OutputLocked(
                        f"{self.path.parent}: a run that was killed ({owner}) has left a process that is still ending; "
                        "wait a moment and run again"
                    )
            elif waited >= min(self._patience, DYING_SECONDS):
                raise OutputLocked(
                    f"{self.path.parent}: another run{'' if owner is None else f' ({owner})'} is running there; "
                    "wait for it, stop it, or choose another output"
                )
            time.sleep(LOOK_SECONDS)
        os.ftruncate(descriptor, 0)
        words = (str(os.getpid()), socket.gethostname(), _pid_namespace() or "")
        os.pwrite(descriptor, f"{' '.join(words).rstrip()}\n".encode(), 0)
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

    def _try(self) -> int | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return try_lock(self.path)
        except OSError as error:
            raise StoreError(
                f"{self.path.parent}: can't lock the output: {error.strerror}; choose a folder that you can write to"
            ) from error

    def _owner(self) -> _Owner | None:
        """Who took the lock, as far as it says."""
        try:
            words = self.path.read_text().split()
        except (OSError, UnicodeDecodeError):
            return None
        if len(words) not in (2, 3) or not words[0].isdigit():
            return None
        return _Owner(int(words[0]), words[1], words[2] if len(words) == 3 else None)
