"""Models that lie in a bucket: `s3://BUCKET/PREFIX`, for machines that reach no model hub.

One state of the folder is taken: what its listing says (names, sizes, ETags) is its revision, and each piece is asked
for by that ETag. It appears in the cache whole, under its revision, so what stands there needs no look inside.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from tokenmill.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.adapters.s3.client import S3Connection

SCHEME: Final = "s3://"
SINGLE: Final = ".gguf"

PIECE_BYTES: Final = 32 << 20
AT_ONCE: Final = 16
"""Pieces that are fetched at a time: one connection to S3 is far slower than a disk."""

_MOST_FILES: Final = 2_000
_MOST_LETTERS: Final = 200
"""Of a name in the cache; file systems take 255."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object of the model: its key, its place below the model's folder, its state."""

    key: str
    path: PurePosixPath
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in the cache: where, what state it is, and how many bytes."""

    path: Path
    revision: str
    size: int


def pull(
    url: str, cache: Path, wanted: Sequence[str], connection: S3Connection, say: Callable[[str], None]
) -> PulledModel:
    """Make sure that the model as it is in the bucket now is in the cache.

    Args:
        url: of a folder, or of one GGUF file.
        wanted: patterns of the files that are taken.

    Raises:
        ModelError: there is none, its names can't be used, or the disk is too small.  StoreError: S3 can't be used.
        OSError: the cache can't be written to.
    """
    from pipeline.adapters.s3.url import split_url

    bucket, key = split_url(url)
    files = _files(connection, bucket, key, wanted, url)
    revision = _revision(files)
    size = sum(file.size for file in files)
    final = _place(cache, bucket, key) / revision
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
                if not final.is_dir():  # else another process was first, with the same
                    raise
    path = final / files[0].path if key.endswith(SINGLE) else final
    return PulledModel(path, revision, size)


def cached(cache: Path) -> list[tuple[str, PulledModel]]:
    """The models in the cache, by URL; of each the state that was pulled last."""
    found = []
    for place in sorted((cache / "s3").glob("*/*/")):
        states = sorted(place.glob("[0-9a-f]*/"), key=lambda state: state.stat().st_mtime)
        if states:
            files = [file for file in states[-1].rglob("*") if file.is_file()]
            name = unquote(place.name)
            path = files[0] if name.endswith(SINGLE) and len(files) == 1 else states[-1]
            size = sum(file.stat().st_size for file in files)
            found.append((f"{SCHEME}{place.parent.name}/{name}", PulledModel(path, states[-1].name, size)))
    return found


def _place(cache: Path, bucket: str, key: str) -> Path:
    """Where the model's states are kept: readable where that fits into a name."""
    name = quote(key.rstrip("/"), safe="")
    if len(name) > _MOST_LETTERS:
        name = f"{name[:_MOST_LETTERS]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return cache / "s3" / bucket / (name or "%2F")


def _revision(files: Sequence[RemoteFile]) -> str:
    facts = "\0".join(f"{file.path}\0{file.size}\0{file.etag}" for file in files)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _files(connection: S3Connection, bucket: str, key: str, wanted: Sequence[str], url: str) -> list[RemoteFile]:
    """The model's files, by name. Raises `ModelError`."""
    single = key.endswith(SINGLE)
    prefix = key if single or not key else key.rstrip("/") + "/"
    found = []
    for entry in _listed(connection, bucket, prefix):
        name: str = entry["Key"].rpartition("/")[2] if single else entry["Key"].removeprefix(prefix)
        taken = entry["Key"] == key if single else any(fnmatch(name, pattern) for pattern in wanted)
        if not taken:
            continue
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ModelError(f"{url}: holds a name that can't be a file's ({name!r}); rename it there")
        found.append(RemoteFile(entry["Key"], PurePosixPath(*parts), int(entry["Size"]), entry["ETag"]))
        if len(found) > _MOST_FILES:
            raise ModelError(f"{url}: holds more than {_MOST_FILES} files, so it is no model; name its folder")
    if not found:
        raise ModelError(f"{url}: there is no model; give a folder that holds config.json, or a GGUF file")
    return sorted(found, key=lambda file: file.path)


def _listed(connection: S3Connection, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    request: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    while True:
        where = f"{SCHEME}{bucket}/{prefix}"
        page = connection.run("list it", where, partial(connection.client.list_objects_v2, **request))
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        request["ContinuationToken"] = page["NextContinuationToken"]


def _fetch(connection: S3Connection, bucket: str, files: Sequence[RemoteFile], folder: Path, url: str) -> None:
    """Write all files below the folder, durably, many pieces at a time."""
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
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="weights") as threads:
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
