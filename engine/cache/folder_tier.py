"""A tier of blocks in a folder, which processes may share and later ones find.

    FOLDER/IDENTITY/xx/PREFIX-GROUP     xx: the first two digits of PREFIX

A file is a digest and the block's bytes. The digest covers all that the block must be: the identity (the model, how it
is computed and how blocks are laid out), the group, the prefix, the tokens, and the bytes. So a truncated or altered
file, or one of another model, owner or layout under this name, fails one comparison: it is removed and counted, and its
tokens are computed. The digest is not keyed: whoever may write to the folder can forge blocks.

Files are written beside their names and renamed, without a sync: after a crash of the machine a file may be damaged,
which the digest detects. A file's modification time is its last use.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from threading import Lock

import numpy as np

from engine.cache.block_tier import BlockKey, Bytes, TierStats
from engine.logs import get_logger

logger = get_logger(__name__)

_DIGEST_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/([0-9a-f]+-\d+|\.[0-9a-f]+-\d+\.[0-9a-f]+\.tmp)")
_TEMPORARY_SECONDS = 3600.0
"""Age at which a temporary file is one that a killed process left."""

_MAX_PENDING_BYTES = 64 << 20
"""Bytes that wait for the writer before it counts as busy."""

_SHARE_TO_RESCAN = 16
"""The folder is measured again after this fraction (1 / n) of its size was written: other processes write, too."""


class FolderTier:
    """A `BlockTier` on disk. A thread of its own writes.

    Args:
        folder: created if it does not exist. Other files in it are left alone.
        identity: of model, arithmetic and layout; blocks of another one are never used.
        max_bytes: of all blocks in the folder, those of other identities included. Each further process may exceed it
            by a sixteenth for a moment.
    """

    def __init__(self, folder: Path, identity: str, max_bytes: int) -> None:
        self._root = folder
        self._identity = blake2b(identity.encode(), digest_size=_DIGEST_BYTES).digest()
        self._folder = folder / self._identity[:16].hex()
        self._max_bytes = max_bytes
        self._room = 0  # bytes to write until the folder is measured
        self._hits = self._bytes_read = self._bytes_written = self._rejected = self._pending = 0
        self._lock = Lock()  # of the counters that both threads change, and of `_is_on`
        self._is_on = True
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="block-tier")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._switch_off(error)

    @property
    def is_busy(self) -> bool:
        """See `BlockTier`."""
        return self._pending >= _MAX_PENDING_BYTES

    def contains(self, key: BlockKey) -> bool:
        """See `BlockTier`."""
        return self._is_on and self._path(key).exists()

    def load(self, key: BlockKey) -> Bytes | None:
        """See `BlockTier`."""
        if not self._is_on:
            return None
        path = self._path(key)
        try:
            content = path.read_bytes()
            data = np.frombuffer(content, dtype=np.uint8)[_DIGEST_BYTES:]
            if content[:_DIGEST_BYTES] != self._digest(key, data):
                self._rejected += 1
                path.unlink(missing_ok=True)
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._switch_off(error)
            return None
        self._hits += 1
        self._bytes_read += len(data)
        return data

    def store(self, key: BlockKey, num_bytes: int, content: Callable[[], Bytes]) -> None:
        """See `BlockTier`."""
        if self._is_on:
            with self._lock:
                self._pending += num_bytes
            self._writer.submit(self._write, key, num_bytes, content)

    def discard(self, key: BlockKey) -> None:
        """See `BlockTier`. It may be about to be written, so the writer removes it, too."""
        if self._is_on:
            self._remove(self._path(key))
            self._writer.submit(self._remove, self._path(key))

    def stats(self) -> TierStats:
        """See `BlockTier`."""
        return TierStats(self._hits, self._bytes_read, self._bytes_written, self._rejected, self._is_on)

    def close(self) -> None:
        """See `BlockTier`."""
        self._writer.shutdown(wait=True)

    def _path(self, key: BlockKey) -> Path:
        name = key.digest.hex()
        return self._folder / name[:2] / f"{name}-{key.group}"

    def _digest(self, key: BlockKey, data: Bytes) -> bytes:
        digest = blake2b(self._identity, digest_size=_DIGEST_BYTES)
        digest.update(b"%d,%d,%d:" % (key.group, len(key.digest), len(key.token_bytes)))
        digest.update(key.digest + key.token_bytes)
        digest.update(data.data)
        return digest.digest()

    def _write(self, key: BlockKey, num_bytes: int, content: Callable[[], Bytes]) -> None:
        try:
            if self._is_on:
                data = content()
                self._write_file(self._path(key), self._digest(key, data), data)
        except Exception as error:  # noqa: BLE001 - of the writer's thread: it is logged, and nothing is stored any more
            self._switch_off(error)
        finally:
            with self._lock:
                self._pending -= num_bytes

    def _write_file(self, path: Path, digest: bytes, data: Bytes) -> None:
        if path.exists():  # another process was faster
            os.utime(path)
            return
        size = len(digest) + len(data)
        if size > self._room:
            self._make_room(size)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(digest)
                file.write(data.data)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._room -= size
        self._bytes_written += len(data)

    def _make_room(self, size: int) -> None:
        """Measure the folder, and remove the blocks that were not used for longest until `size` bytes fit.

        Raises:
            OSError: they never do.
        """
        if size > self._max_bytes:
            raise OSError(f"a block of {size} bytes is larger than the tier, {self._max_bytes} bytes")
        rescan = self._max_bytes // _SHARE_TO_RESCAN
        files = sorted((stat.st_mtime_ns, stat.st_size, path) for path, stat in self._files())
        total = sum(size for _, size, _ in files)
        target = self._max_bytes - size if total + size <= self._max_bytes else self._max_bytes - max(size, rescan)
        for _, of_file, path in files:
            if total <= target:
                break
            self._remove(path)
            total -= of_file
        self._room = max(size, min(self._max_bytes - total, rescan))

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Iterate over the files of blocks. Temporary ones that a killed process left are removed."""
        now = time.time()
        for path in self._root.glob("*/*/*"):
            if _NAME.fullmatch(path.relative_to(self._root).as_posix()):
                with suppress(FileNotFoundError):  # another process removed it
                    stat = path.stat()
                    if path.suffix != ".tmp":
                        yield path, stat
                    elif now - stat.st_mtime > _TEMPORARY_SECONDS:
                        path.unlink()

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        with self._lock:
            was_on, self._is_on = self._is_on, False
        if was_on:
            logger.warning(
                "the second tier of the prefix cache is off: its folder can't be used",
                folder=str(self._root), error=f"{type(error).__name__}: {error}",
            )  # fmt: skip
