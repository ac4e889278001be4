"""Fixing what a job reads: its files, their sizes and hashes, so that a changed input is noticed and never mixed in."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pipeline.planner.api import InputError, SourceFile
from pipeline.planner.source import choose_files
from schemas.job import InputFile, InputRef

_CHUNK = 1 << 20


def pin_input(path: Path) -> InputRef:
    """A local file, or the .jsonl or .parquet files directly in a folder, hashed as a stream.

    Raises:
        InputError: it is missing, can't be read, or holds nothing that is an input.
    """
    place = path.absolute()
    try:
        folder = place.is_dir()
        names = [entry.name for entry in place.iterdir() if entry.is_file()] if folder else [place.name]
        if not folder and not place.exists():
            raise InputError(f"{path}: no such file or folder; check the input's path")
        kind, chosen = choose_files(str(path), names, folder=folder)
        parent = place if folder else place.parent
        return InputRef(uri=str(place), format=kind, files=tuple(_pin(parent / name) for name in chosen))
    except OSError as error:
        raise InputError(f"{error.filename or path}: can't read the input: {error.strerror}") from error


def source_files(pinned: InputRef) -> list[SourceFile]:
    """The pinned files, to be opened for planning; opening raises `InputError` when one is gone or has another size."""
    return [SourceFile(file.uri, partial(_open, file)) for file in pinned.files]


def _pin(path: Path) -> InputFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return InputFile(uri=str(path), size=size, sha256=digest.hexdigest())


def _open(file: InputFile) -> BinaryIO:
    try:
        stream = Path(file.uri).open("rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise InputError(f"{file.uri}: can't read the input: {error.strerror}; put it back and run again") from error
    size = stream.seek(0, 2)
    stream.seek(0)
    if size != file.size:
        stream.close()
        raise InputError(
            f"{file.uri}: has {size} bytes, but had {file.size} when the job was accepted; "
            "put the old file back, or start anew with --fresh"
        )
    return stream
