"""Pinning of a job's local input: its files, their sizes and hashes, so that a changed input is detected and never
mixed in.

Hashing reads every byte, which a resumed job should avoid. So the file system's stamp is stored with the hash: while
size, times and inode are unchanged, so are the bytes. Copied, touched or moved files are hashed again, and are the same
input if their bytes are; this also holds while they are read for the plan. Three changes are not detected: a write
within the clock tick in which the file was hashed, a write below the file system, and a write that was undone, byte for
byte, before the next check.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from pipeline.inputs.regular_files import IrregularFile, open_regular
from pipeline.inputs.reported_reads import with_reported_reads
from pipeline.planner.ports import InputError, SourceFile
from pipeline.planner.readers.source import choose_files
from schemas.jobs.inputs import FileStamp, InputFile, InputRef

OpenFile = Callable[[Path], BufferedReader]


def pin_input(path: Path, known: InputRef | None = None, open_file: OpenFile = open_regular) -> InputRef:
    """A local file, or the files of one format directly in a folder, hashed as a stream.

    Args:
        known: an earlier pinning; its files are hashed again only if their stamps changed.
        open_file: opens each of them; raises `IrregularFile` for anything but a regular file.

    Raises:
        InputError: it is missing, can't be read, is no regular file, changes while it is read, or holds nothing that
            is an input.
    """
    location = path.absolute()
    try:
        folder = location.is_dir()
        names = [entry.name for entry in location.iterdir() if entry.is_file()] if folder else [location.name]
        if not folder and not location.exists():
            raise InputError(f"{path}: no such file or folder; check the input's path")
        kind, chosen = choose_files(str(path), names, folder=folder)
        parent = location if folder else location.parent
        hashed = {} if known is None else {file.uri: file for file in known.files}
        return InputRef(
            uri=str(location), format=kind, files=tuple(_pin(parent / name, hashed, open_file) for name in chosen)
        )
    except IrregularFile as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{error.filename or path}: can't read the input: {error.strerror}") from error


def pin_again(pinned: InputRef) -> InputRef:
    """Pin the same files again; those with changed stamps are hashed again.

    Raises:
        InputError: one of them is missing, can't be read, or holds other bytes.
    """
    known = {file.uri: file for file in pinned.files}
    files: list[InputFile] = []
    for file in pinned.files:
        try:
            found = _pin(Path(file.uri), known, open_regular)
        except IrregularFile as error:
            raise InputError(str(error)) from error
        except OSError as error:
            raise _unreadable(file, error) from error
        if (found.size, found.sha256) != (file.size, file.sha256 or found.sha256):
            raise InputError(f"{file.uri}: is not what the job was accepted with; put the old file back and try again")
        files.append(found)
    return pinned.model_copy(update={"files": tuple(files)})


class WatchedInput:
    """A pinned input while it is read: `check` verifies that the bytes read are the hashed ones.

    A changed stamp over the same bytes (a hard link, other rights, a touch, a copy in its place, a new inode number of
    the file system) is no error: the file is hashed once more, and continues with its new stamp.
    """

    def __init__(self, pinned: InputRef, on_read: Callable[[], None] | None = None) -> None:
        """`on_read`: called after each read of a file, also when it is hashed once more."""
        self._files = list(pinned.files)
        self._on_read = on_read

    @property
    def pinned(self) -> tuple[InputFile, ...]:
        """The files with their latest stamps."""
        return tuple(self._files)

    def files(self) -> list[SourceFile]:
        """The files, to be opened for planning; opening raises `InputError` when one is gone or has changed."""
        return [SourceFile(file.uri, partial(self._open, index)) for index, file in enumerate(self._files)]

    def check(self) -> None:
        """Check that the files still contain the hashed bytes; read again only if size or stamp changed.

        Raises:
            InputError: one of them is gone, can't be read, or has changed.
        """
        for index, file in enumerate(self._files):
            try:
                status = os.stat(file.uri)
            except OSError as error:
                raise _unreadable(file, error) from error
            if not _is_as_pinned(file, *_stamped(status)):
                self._open(index).close()

    def _open(self, index: int) -> BinaryIO:
        file = self._files[index]
        try:
            stream = with_reported_reads(open_regular(Path(file.uri)), self._on_read)
        except IrregularFile as error:
            raise InputError(str(error)) from error
        except OSError as error:
            raise _unreadable(file, error) from error
        try:
            if not _is_as_pinned(file, *_read_stamp(stream)):
                self._files[index] = _hash_again(file, stream)
        except OSError as error:
            stream.close()
            raise _unreadable(file, error) from error
        except InputError:
            stream.close()
            raise
        return stream


def _pin(path: Path, hashed: Mapping[str, InputFile], open_file: OpenFile) -> InputFile:
    known = hashed.get(str(path))
    with open_file(path) as stream:
        size, stamp = _read_stamp(stream)
        if known is not None and known.sha256 is not None and (known.size, known.stamp) == (size, stamp):
            return known
        return _hash(stream, str(path))


def _hash(stream: BufferedReader, uri: str) -> InputFile:
    """Hash an open file from its current position, which must be its start."""
    size, stamp = _read_stamp(stream)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if _read_stamp(stream) != (size, stamp):
        raise InputError(f"{uri}: changes while it is read; wait until it is written, and run again")
    return InputFile(uri=uri, size=size, sha256=digest, stamp=stamp)


def _read_stamp(stream: BinaryIO) -> tuple[int, FileStamp]:
    """Size and stamp of an open file."""
    return _stamped(os.fstat(stream.fileno()))


def _stamped(status: os.stat_result) -> tuple[int, FileStamp]:
    return status.st_size, FileStamp(mtime=status.st_mtime_ns, ctime=status.st_ctime_ns, inode=status.st_ino)


def _is_as_pinned(file: InputFile, size: int, stamp: FileStamp) -> bool:
    """Whether the file's stamp is unchanged. Raises `InputError` when its bytes have certainly changed."""
    if size != file.size:
        raise InputError(
            f"{file.uri}: has {size} bytes, but had {file.size} when the job was accepted; "
            "put the old file back, or start anew with --fresh"
        )
    return file.stamp in (None, stamp)


def _hash_again(file: InputFile, stream: BufferedReader) -> InputFile:
    """Hash a file with a new stamp, and rewind it; other bytes raise `InputError`."""
    found = _hash(stream, file.uri)
    if (found.size, found.sha256) != (file.size, file.sha256):
        raise InputError(
            f"{file.uri}: was written or replaced after it was hashed, and holds other bytes now; "
            "put the old file back and run again (what is committed stays), or start anew with --fresh"
        )
    stream.seek(0)
    return found


def _unreadable(file: InputFile, error: OSError) -> InputError:
    return InputError(f"{file.uri}: can't read the input: {error.strerror}; put it back and run again")
