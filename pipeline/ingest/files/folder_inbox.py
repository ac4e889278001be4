"""An inbox on a local folder, for the embedded form; it is listed periodically.

A folder doesn't report when a file is complete. So a file is taken when it has been unchanged for `settle` seconds, by
this process's own clock: size, times and inode. Slow writers use a name that isn't taken, such as .NAME or NAME.part,
and rename the file at the end.

A file is identified by its name, its bytes and its modification time. So a new copy of it is a new job, while a backup
that is restored with its times is not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from pipeline.adapters.folder.store import FolderStore
from pipeline.ingest.files.source import Entry, FileStillChanging, FileVersion, PinnedFile
from pipeline.ingest.intake import IntakeRefused
from pipeline.inputs.pinning import pin_input
from pipeline.inputs.regular_files import IrregularFile, open_regular_below
from pipeline.ports import Clock, StoreError
from schemas.jobs.inputs import InputFormat, InputRef

INCOMING = "incoming/"
_MAX_PINNED = 256
_MIN_MTIME, _MAX_MTIME = 86_400, 32_503_680_000
"""Range of plausible modification times, in seconds after 1970: up to the year 3000."""


class FolderInbox:
    """`Inbox` on the files below `prefix` in a folder store's root.

    Args:
        settle: seconds for which a file must be unchanged before it is taken.
    """

    kind = "folder"

    def __init__(
        self,
        store: FolderStore,
        clock: Clock,
        *,
        prefix: str = INCOMING,
        tenant: str = "default",
        settle: float = 2.0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._prefix = prefix
        self._settle = settle
        self._seen: dict[str, tuple[str, float]] = {}  # name -> its stamp, and since when it is unchanged
        self._pinned: dict[str, InputRef] = {}  # by name: a file that has to wait is not hashed again
        self.tenant = tenant

    def entries(self) -> Iterator[Entry]:
        """Files that have been unchanged for long enough, sorted by name."""
        now, seen = self._clock.monotonic(), dict[str, tuple[str, float]]()
        for info in self._store.list(self._prefix):
            name = info.key.removeprefix(self._prefix)
            status = self._status(name)
            if status is not None:
                stamp = _stamp(status)
                known, since = self._seen.get(name, ("", now))
                seen[name] = (stamp, since if known == stamp else now)
        self._seen = seen
        for name, (stamp, since) in sorted(seen.items()):
            if now - since >= self._settle:
                yield Entry(name, int(stamp.partition("-")[0]), stamp)

    def find(self, name: str, version: str | None = None) -> FileVersion | None:
        """See `Inbox`; raises `FileStillChanging` for a file that has not been unchanged for long enough."""
        status = self._status(name)
        if status is None:
            return None
        stamp, now = _stamp(status), self._clock.monotonic()
        known, since = self._seen.setdefault(name, (stamp, now))
        if known != stamp or now - since < self._settle:
            raise FileStillChanging(f"{self.uri(name)}: has just changed")
        seconds = min(max(status.st_mtime_ns / 1e9, _MIN_MTIME), _MAX_MTIME)
        return FileVersion(Entry(name, status.st_size, stamp), modified=datetime.fromtimestamp(seconds, UTC))

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """See `Inbox`. Raises `IntakeRefused` for anything but a regular file: senders must not make others read files
        that only this process may read, nor block it."""
        path = self._path(name)
        try:
            with open_regular_below(self._folder, path) as stream:
                return stream.read(max_bytes)
        except FileNotFoundError:
            return None
        except IrregularFile as error:
            raise IntakeRefused("unsupported_file", str(error)) from error
        except OSError as error:
            raise StoreError(f"{path}: can't read: {error.strerror}") from error

    def pin(self, drop: FileVersion, kind: InputFormat) -> PinnedFile:
        """See `Inbox`. Reads the file once, for its hash."""
        name = drop.entry.name
        path = self._path(name)
        pinned = pin_input(path, self._pinned.get(name), self._open)
        self._remember(name, pinned)
        status = self._status(name)
        if status is None or _stamp(status) != drop.entry.stamp:
            raise FileStillChanging(f"{path}: changed while it was read")
        file = pinned.files[0]
        identity = (self._prefix + name, file.sha256 or "", str(status.st_mtime_ns))
        return PinnedFile(pinned, identity)

    def uri(self, name: str) -> str:
        """See `Inbox`."""
        return self._store.locate(self._prefix + name)

    def _open(self, path: Path) -> BufferedReader:
        """Open a regular file below the folder; raises as `read`."""
        try:
            return open_regular_below(self._folder, path)
        except IrregularFile as error:
            raise IntakeRefused("unsupported_file", str(error)) from error

    @property
    def _folder(self) -> Path:
        return Path(self._store.locate(self._prefix))

    def _remember(self, name: str, pinned: InputRef) -> None:
        self._pinned[name] = pinned
        if len(self._pinned) > _MAX_PINNED:
            del self._pinned[next(iter(self._pinned))]

    def _path(self, name: str) -> Path:
        return Path(self.uri(name))

    def _status(self, name: str) -> os.stat_result | None:
        """The status of the name itself, not of a link's target; None when it is no file."""
        try:
            status = self._path(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.uri(name)}: can't read its status: {error.strerror}") from error
        return status if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) else None


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
