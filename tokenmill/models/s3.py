"""Models in a bucket: `s3://BUCKET/PREFIX`, for machines without access to a model hub.

The hash of the folder's listing (names, sizes, ETags) is its revision, and each piece is requested with its ETag, so
that one consistent state is pulled. It is renamed into the cache when complete, under its revision, and needs no
further check.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from tokenmill.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.adapters.s3.client import S3Connection

SCHEME: Final = "s3://"
SINGLE: Final = ".gguf"

PIECE_BYTES: Final = 32 << 20
MAX_DOWNLOADS: Final = 16
"""Concurrent downloads of pieces: one connection to S3 is far slower than a disk."""

NO_MODEL: Final = "there is no model; give a folder that holds config.json, or a GGUF file"

_MAX_FILES: Final = 2_000
_MAX_NAME_CHARACTERS: Final = 200
"""Of a name in the cache; file systems allow 255."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object of the model: its key, its path below the model's folder, its size and ETag."""

    key: str
    path: PurePosixPath
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the cache: its path, revision and size in bytes."""

    path: Path
    revision: str
    size: int


def pull(
    url: str,
    cache: Path,
    wanted: Sequence[str],
    connection: S3Connection,
    say: Callable[[str], None],
    absent: str = NO_MODEL,
) -> PulledModel:
    """Pull the current state of the model into the cache, if it isn't there.

    Args:
        url: of a folder, or of one GGUF file.
        wanted: patterns of the files to pull.  absent: the error where there is none of them.

    Raises:
        ModelError: there is none, its names can't be used, or the disk is too small.  StoreError: S3 can't be used.
        OSError: the cache can't be written to.
    """
    from pipeline.adapters.s3.url import split_url

    bucket, key = split_url(url)
    files = _files(connection, bucket, key, wanted, url)
    if not files:
        raise ModelError(f"{url}: {absent}")
    revision = _revision(files)
    size = sum(file.size for file in files)
    final = _model_folder(cache, bucket, key) / revision
    if not final.is_dir():
        final.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(final.parent).free
        if size > free:
            raise ModelError(f"{url} has {size / 1e9:.1f} GB, and {cache} only {free / 1e9:.1f} GB of room; free some")
        say(f"pulling {url} ({size / 1e9:.1f} GB)")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=final.parent) as scratch:
            made = Path(scratch) / "model"
            _fetch(connection, bucket, files, made, url)
            try:
                made.rename(final)
            except OSError:
                if not final.is_dir():  # else another process has pulled the same state
                    raise
    path = final / files[0].path if key.endswith(SINGLE) else final
    return PulledModel(path, revision, size)


def cached(cache: Path) -> list[tuple[str, PulledModel]]:
    """The models in the cache, by URL; of each the last pulled state."""
    found = []
    for folder in sorted((cache / "s3").glob("*/*/")):
        states = sorted(folder.glob("[0-9a-f]*/"), key=lambda state: state.stat().st_mtime)
        if states:
            files = [file for file in states[-1].rglob("*") if file.is_file()]
            name = unquote(folder.name)
            path = files[0] if name.endswith(SINGLE) and len(files) == 1 else states[-1]
            size = sum(file.stat().st_size for file in files)
            found.append((f"{SCHEME}{folder.parent.name}/{name}", PulledModel(path, states[-1].name, size)))
    return found


def _model_folder(cache: Path, bucket: str, key: str) -> Path:
    """The cache folder of the model's states; its name is readable if short enough."""
    name = quote(key.rstrip("/"), safe="")
    if len(name) > _MAX_NAME_CHARACTERS:
        name = f"{name[:_MAX_NAME_CHARACTERS]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return cache / "s3" / bucket / (name or "%2F")


def _revision(files: Sequence[RemoteFile]) -> str:
    facts = "\0".join(f"{file.path}\0{file.size}\0{file.etag}" for file in files)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _files(connection: S3Connection, bucket: str, key: str, wanted: Sequence[str], url: str) -> list[RemoteFile]:
    """The model's files, by name. Raises `ModelError`."""
    from pipeline.adapters.s3.listing import list_objects

    single = key.endswith(SINGLE)
    prefix = key if single or not key else key.rstrip("/") + "/"
    found = []
    for entry in list_objects(connection, bucket, prefix):
        name: str = entry["Key"].rpartition("/")[2] if single else entry["Key"].removeprefix(prefix)
        taken = entry["Key"] == key if single else any(fnmatch(name, pattern) for pattern in wanted)
        if not taken:
            continue
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ModelError(f"{url}: holds a name that can't be a file's ({name!r}); rename it there")
        found.append(RemoteFile(entry["Key"], PurePosixPath(*parts), int(entry["Size"]), entry["ETag"]))
        if len(found) > _MAX_FILES:
            raise ModelError(f"{url}: holds more than {_MAX_FILES} files, so it is no model; name its folder")
    return sorted(found, key=lambda file: file.path)


def _fetch(connection: S3Connection, bucket: str, files: Sequence[RemoteFile], folder: Path, url: str) -> None:
    """Write all files below the folder, durably, by concurrent downloads of pieces."""
    from pipeline.adapters.s3.client import ConditionFailed, MissingObject

    def piece(file: RemoteFile, begin: int) -> None:
        count = min(PIECE_BYTES, file.size - begin)

        def get() -> bytes:
            answer = connection.client.get_object(
                Bucket=bucket, Key=file.key, IfMatch=file.etag, Range=f"bytes={begin}-{begin + count - 1}"
            )
            return bytes(answer["Body"].read())

        try:
            data = connection.run("read it", f"{SCHEME}{bucket}/{file.key}", get)
        except (MissingObject, ConditionFailed) as error:
            raise ModelError(f"{url}: {file.path} was changed while it was pulled; start again") from error
        if len(data) != count:
            raise ModelError(f"{url}: {file.path} came short; start again")
        with (folder / file.path).open("r+b") as out:
            os.pwrite(out.fileno(), data, begin)

    for file in files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(exist_ok=False)
        os.truncate(target, file.size)
    with ThreadPoolExecutor(MAX_DOWNLOADS, thread_name_prefix="weights") as threads:
        pieces = [threads.submit(piece, file, begin) for file in files for begin in range(0, file.size, PIECE_BYTES)]
        try:
            for done in pieces:
                done.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    for file in files:
        with (folder / file.path).open("rb") as written:
            os.fsync(written.fileno())
