"""An object store on a folder of a local disk.

An object is created by one `link` of a finished, synced, private file to its final name. So readers never see a torn
object, exactly one of two racing writers wins, and a killed writer leaves at most a temporary file under `.tmp/`, which
is swept when its owner is gone. (`O_EXCL` on the final name would not suffice: a kill between create and write leaves a
torn object that counts as committed.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from pipeline.adapters.folder.durable import LOCAL_DISK, Disk, make_folders, write_durably
from pipeline.adapters.folder.scratch import PrivateFolder
from pipeline.adapters.object_keys import check_key, check_prefix, is_object_name
from pipeline.ports import ObjectInfo, ObjectNotFound, StoreError, failure_type


class FolderStore:
    """`ObjectStore` on `root`, which is created when it is missing. Threads may share one; `close` removes temporary
    files.

    Args:
        root: the folder.  read_only: nothing is created in `root`, not even a temporary file.
        disk: changes files.

    Raises:
        StoreError: the folder can't be written, or lacks what create-if-absent needs (hard links, sync, locks).
    """

    def __init__(self, root: Path, *, read_only: bool = False, disk: Disk = LOCAL_DISK) -> None:
        self.root = root.absolute()
        self._disk = disk
        self._private: PrivateFolder | None = None
        self._synced: set[Path] = set()
        if read_only:
            if not self.root.is_dir():
                raise StoreError(f"{root}: no such folder")
            return
        try:
            _make_root(disk, self.root)
            self._private = PrivateFolder(self.root, disk)
            self._private.sweep_dead()
            self._probe(self._private)
        except (FileExistsError, NotADirectoryError) as error:
            self.close()
            raise StoreError(f"{root}: a file is in the way, so no folder can be there; choose another") from error
        except OSError as error:
            self.close()
            self._fail("can't be used as an output", self.root, error)
        except BaseException:
            self.close()
            raise

    @property
    def scratch(self) -> Path:
        """A private folder on the same file system: a file built there becomes an object without a copy."""
        return self._writable().path

    def create(self, key: str, data: bytes | Path) -> bool:
        """Create the object durably; False if it exists already, and then nothing was changed.

        A `Path` is a closed local file whose ownership passes to the store: it is moved if it is on the same file
        system, else copied, and it is gone when this returns, won or lost.
        """
        private, final = self._writable(), self._path(key)
        temporary = private.new_path()
        try:
            if isinstance(data, Path):
                self._take_over(data, temporary)
            else:
                write_durably(self._disk, temporary, data)
            return self._publish(temporary, final)
        except OSError as error:
            self._fail(f"can't create {key}", final, error)
        finally:
            self._remove(temporary)

    def read(self, key: str) -> bytes:
        """The whole object; raises `ObjectNotFound`."""
        with self.open(key) as stream:
            try:
                return stream.read()
            except OSError as error:
                self._fail(f"can't read {key}", self._path(key), error)

    def open(self, key: str) -> BinaryIO:
        """A seekable stream over the object; raises `ObjectNotFound`."""
        path = self._path(key)
        try:
            with contextlib.ExitStack() as undo:
                stream = undo.enter_context(path.open("rb"))
                if self._private is not None:
                    # Its writer may have died between the link and the sync. Objects that depend on it must not outlive
                    # it.
                    self._disk.sync_folder(path.parent)
                undo.pop_all()
            return stream
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFound(f"{path}: no such object") from error
        except OSError as error:
            self._fail(f"can't read {key}", path, error)

    def info(self, key: str) -> ObjectInfo | None:
        """Size of an object, or None if there is none."""
        path = self._path(key)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._fail(f"can't read the status of {key}", path, error)
        return ObjectInfo(key, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose keys start with `prefix`, in key order, after `after`; holds the names of one folder at a
        time."""
        check_prefix(prefix)
        folder, _, beginning = prefix.rpartition("/")
        return self._walk(f"{folder}/" if folder else "", beginning, after)

    def folders(self, prefix: str) -> Iterator[str]:
        """Prefixes directly below `prefix`, in order."""
        check_prefix(prefix)
        return (prefix + name for name in self._names(prefix, "") if name.endswith("/"))

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
        path = self._path(key)
        self._writable()
        try:
            self._disk.unlink(path)
            self._disk.sync_folder(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._fail(f"can't delete {key}", path, error)

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite atomically; not synced, because only caches are written this way."""
        temporary, path = self._writable().new_path(), self._path(key)
        try:
            self._disk.write_new(temporary, data)
            self._make_parent(path)
            self._disk.rename(temporary, path)
        except OSError as error:
            self._fail(f"can't write {key}", path, error)
        finally:
            self._remove(temporary)

    def locate(self, key: str) -> str:
        """The object's path."""
        return str(self.root / key)

    def close(self) -> None:
        """Remove this store's temporary files and release its lock."""
        if self._private is not None:
            private, self._private = self._private, None
            private.close()

    def __enter__(self) -> FolderStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _writable(self) -> PrivateFolder:
        if self._private is None:
            raise StoreError(f"{self.root}: this store was opened for reading only")
        return self._private

    def _publish(self, temporary: Path, final: Path) -> bool:
        """Link the finished file to its final name: the instant at which the object is created."""
        self._make_parent(final)
        try:
            self._disk.link(temporary, final)
            won = True
        except FileExistsError:
            # Over NFS a repeated request can report its own success as "exists".
            won = final.exists() and os.path.samestat(temporary.stat(), final.stat())
            if not won and not final.is_file():
                raise
        # The loser syncs too: it will rely on the object's existence, perhaps before the winner has synced.
        self._disk.sync_folder(final.parent)
        return won

    def _take_over(self, source: Path, temporary: Path) -> None:
        """Move the caller's file to `temporary`, synced; copies across file systems."""
        try:
            self._disk.sync_file(source)
            self._disk.rename(source, temporary)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(source, temporary)
            self._disk.sync_file(temporary)
            self._disk.unlink(source)

    def _remove(self, temporary: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(temporary)

    def _make_parent(self, path: Path) -> None:
        folder = path.parent
        if folder in self._synced and folder.is_dir():
            return
        make_folders(self._disk, folder, below=self.root)
        self._synced.add(folder)

    def _walk(self, folder: str, beginning: str, after: str) -> Iterator[ObjectInfo]:
        """Objects below `folder` ("" or ends in "/") whose name in it starts with `beginning`, after the key
        `after`."""
        for name in self._names(folder, beginning):
            key = folder + name
            if key <= after and not after.startswith(key):  # keys after a folder's name may be in the folder
                continue
            if name.endswith("/"):
                yield from self._walk(key, "", after)
            elif key > after and (found := self.info(key)) is not None:
                yield found

    def _names(self, folder: str, beginning: str) -> Sequence[str]:
        """Names in `folder` that can be parts of keys, in key order; names of folders end in "/"."""
        path = self.root / folder
        try:
            with os.scandir(path) as entries:
                return sorted(
                    entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                    for entry in entries
                    if entry.name.startswith(beginning) and is_object_name(entry.name)
                )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self._fail("can't list", path, error)

    def _probe(self, private: PrivateFolder) -> None:
        """Test the operations of create-if-absent, so that a folder which lacks them is refused at the start."""
        first, second, final = private.new_path(), private.new_path(), private.new_path()
        write_durably(self._disk, first, b"1")
        write_durably(self._disk, second, b"2")
        self._disk.link(first, final)
        try:
            self._disk.link(second, final)
        except FileExistsError:
            pass
        else:
            raise StoreError(f"{self.root}: links replace files here, so commits would not be safe; use a local disk")
        if final.read_bytes() != b"1":
            raise StoreError(f"{self.root}: a refused link changed a file, so commits would not be safe")
        self._disk.sync_folder(private.path)
        for path in (first, second, final):
            self._disk.unlink(path)

    def _fail(self, what: str, path: Path, error: OSError) -> NoReturn:
        hint = _HINTS.get(error.errno or 0, "")
        raise failure_type(error)(f"{path}: {what}: {error.strerror or error}{hint}") from error


_HINTS = {
    errno.ENOSPC: "; free some space and run the same command again",
    errno.EDQUOT: "; the quota is used up: free some space and run the same command again",
    errno.EROFS: "; choose a folder on a writable disk",
    errno.EACCES: "; choose a folder that you can write to",
    errno.ENOENT: "; choose a folder that can be made",
    errno.EPERM: "; the file system may not support hard links: choose a folder on a local disk",
    errno.EOPNOTSUPP: "; the file system lacks hard links or locks: choose a folder on a local disk",
    errno.ENOTDIR: "; choose a folder",
    errno.EEXIST: "; something that isn't an object is in its place",
}


def _make_root(disk: Disk, root: Path) -> None:
    if root.is_dir():
        return
    existing = next(parent for parent in root.parents if parent.exists())
    make_folders(disk, root, below=existing)
