"""Files as OpenAI's API has them, on the store: what is uploaded, and what batches leave.

A file is there when its `file.json` is; that is written last. One that is to go gets a mark first, by which it is gone
for everybody; then its objects go, `file.json` and the mark at the end. So either is finished by whoever comes next.

An open job reads its input for a long time. It leaves word with the file before it is made, and looks once more whether
the file is there; who removes a file marks it, and looks once more for readers. One of the two sees the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.gateway.http.errors import ApiError, not_found, unavailable
from pipeline.gateway.http.pagination import PageRequest, PageResult, list_ids, map_chunks, take_page
from pipeline.gateway.limits.storage_quota import StorageQuota, StoredUsage
from pipeline.gateway.records import FILES, Reader, StoredFile, is_file_id, read_marker
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.ledger.tenant_index import files_of
from pipeline.ports import ObjectNotFound, ObjectStore, World
from schemas.jobs.inputs import InputFile, InputRef

BEGINNING: Final = timedelta(hours=1)
"""A reader whose job doesn't stand after so long never became one."""

NO_QUOTA: Final = StorageQuota()

_AT_ONCE: Final = 16
_BEHIND: Final = "~"
"""Behind an id: it sorts behind the id's marker."""


class Files:
    """The files of all tenants in the root that `world.store` is. Threads may share one.

    Args:
        together: looks at several of a page at a time.

    Attributes:
        usage: what tenants have stored.
    """

    def __init__(self, world: World, together: Executor) -> None:
        self._world = world
        self._store = world.store
        self._together = together
        self.usage = StoredUsage(world.store, world.clock)

    def add(self, file: StoredFile, content: Path, quota: StorageQuota = NO_QUOTA) -> StoredFile:
        """Store a file whose bytes are at `content`, which is given away. One of this id that stands is kept. Raises
        `ApiError` when it would exceed the quota."""
        standing = self._read(file.id)
        if standing is not None:
            content.unlink()
            return standing
        with self.usage.reserve(file.tenant, file.marker, file.size, quota):
            return self._add(file, content)

    def _add(self, file: StoredFile, content: Path) -> StoredFile:
        self._store.create(_content(file.id), content)
        files_of(file.tenant).add(self._store, file.marker)
        created = self._store.create(_paper(file.id), file.to_json())
        standing = self._read(file.id)
        if standing is None:  # what was left over of it is just being removed
            raise unavailable("the file can't be kept just now; send it again")
        return file if created else standing

    def get(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """The tenant's file; raises `ApiError` (404)."""
        found = self._read(file_id) if is_file_id(file_id) else None
        if found is None or found.tenant != tenant or self._is_gone(found):
            raise not_found("file", file_id, param)
        return found

    def open(self, file: StoredFile) -> BinaryIO:
        """Its bytes, as a seekable stream; raises `ApiError` when they have just gone."""
        try:
            return self._store.open(_content(file.id))
        except ObjectNotFound as error:
            raise not_found("file", file.id) from error

    def page(self, tenant: str, page: PageRequest, purpose: str | None = None) -> PageResult:
        """Some of the tenant's files; with `purpose`, those of it. Only these are read: markers say what a file is
        for."""

        def look(name: str) -> StoredFile | None:
            file_id = read_marker(name).id
            found = self._read(file_id) if is_file_id(file_id) else None
            if found is None:
                self._remove_orphan(tenant, name)
            return None if found is None or self._is_gone(found) else found

        behind = page if page.after is None else replace(page, after=page.after + _BEHIND)
        names: Iterator[str] = list_ids(self._store, files_of(tenant), behind)
        if purpose is not None:
            names = (name for name in names if read_marker(name).purpose == purpose)
        looked = map_chunks(look, names, self._together.map, _AT_ONCE)
        data, more = take_page(looked, page.limit)
        return PageResult([file.document() for file in data], more)

    def delete(self, tenant: str, file_id: str) -> StoredFile:
        """Remove the tenant's file, and say what it was.

        Raises:
            ApiError: there is none (404), or an open batch reads it (409).
        """
        file = self.get(tenant, file_id)
        reader = self._open_reader(file_id)
        if reader is None:
            self._store.create(_deleted(file_id), b"")
            reader = self._open_reader(file_id)  # one that began meanwhile: it may not have seen the mark
            if reader is None:
                self._remove(file)
                self.usage.subtract(tenant, file.size)
                return file
            self._store.delete(_deleted(file_id))
        raise ApiError(
            409,
            "file_in_use",
            f"batch {reader} reads file {file_id}; delete it when the batch has ended, or cancel the batch",
            param="file_id",
        )

    def as_input(self, file: StoredFile) -> InputRef:
        """What a job reads of the file."""
        uri = self._store.locate(_content(file.id))
        return InputRef(uri=uri, format=file.format, files=(InputFile(uri=uri, size=file.size, sha256=file.sha256),))

    def keep_for(self, file: StoredFile, job: str) -> None:
        """Leave word that the job, which is to be made now, reads the file; raises `ApiError` when it has gone."""
        self._store.create(_reader(file.id, job), Reader(at=self._world.clock.now()).to_json())
        if self._read(file.id) is None:
            self.let_go(file.id, job)
            raise not_found("file", file.id, "input_file_id")

    def let_go(self, file_id: str, job: str) -> None:
        """The job isn't made."""
        self._store.delete(_reader(file_id, job))

    def _read(self, file_id: str) -> StoredFile | None:
        """The file, if it stands."""
        found = find_file(self._store, file_id)
        return None if found is None or self._store.info(_deleted(file_id)) is not None else found

    def _is_gone(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._world.clock.now()

    def _open_reader(self, file_id: str) -> str | None:
        return open_reader(self._store, file_id, self._world.clock.now())

    def _remove_orphan(self, tenant: str, marker: str) -> None:
        """Remove the marker of an upload that was interrupted, and has been collected: it would count for ever. A file
        that is being stored has content before it has a marker."""
        file_id = read_marker(marker).id
        if self._store.info(_content(file_id)) is None and self._store.info(_paper(file_id)) is None:
            for key in files_of(tenant).keys(marker):
                self._store.delete(key)

    def _remove(self, file: StoredFile) -> None:
        for key in objects_of(self._store, file):
            self._store.delete(key)
        unmark_deleted(self._store, file.id)


def find_file(store: ObjectStore, file_id: str) -> StoredFile | None:
    """What is known of a file, be it marked as deleted or not. Raises `LedgerError` for what is damaged."""
    try:
        data = store.read(_paper(file_id))
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(_paper(file_id)), data, StoredFile)


def is_deleted(store: ObjectStore, file_id: str) -> bool:
    """Whether somebody has begun to remove it."""
    return store.info(_deleted(file_id)) is not None


def mark_deleted(store: ObjectStore, file_id: str) -> None:
    """From now on nobody sees it."""
    store.create(_deleted(file_id), b"")


def unmark_deleted(store: ObjectStore, file_id: str) -> None:
    """It stays after all, or nothing is left of it."""
    store.delete(_deleted(file_id))


def open_reader(store: ObjectStore, file_id: str, now: datetime) -> str | None:
    """A job that reads the file and has not ended, or is just being made."""
    folder = f"{FILES}{file_id}/readers/"
    for info in store.list(folder):
        job = info.key.removeprefix(folder).removesuffix(".json")
        ledger = JobLedger(store, f"{JOBS}{job}/")
        if ledger.find_job() is not None:
            if ledger.manifest() is None:
                return job
        elif _is_beginning(store, info.key, now):
            return job
    return None


def objects_of(store: ObjectStore, file: StoredFile) -> Iterator[str]:
    """Keys of all that the file is, in the order in which they are to be removed; the mark goes after them."""
    yield _content(file.id)
    yield from [info.key for info in store.list(f"{FILES}{file.id}/readers/")]
    yield from files_of(file.tenant).keys(file.marker)
    yield _paper(file.id)


def _is_beginning(store: ObjectStore, key: str, now: datetime) -> bool:
    try:
        word = parse_stored(store.locate(key), store.read(key), Reader)
    except ObjectNotFound:
        return False
    return word.at + BEGINNING > now


def _content(file_id: str) -> str:
    return f"{FILES}{file_id}/content"


def _paper(file_id: str) -> str:
    return f"{FILES}{file_id}/file.json"


def _reader(file_id: str, job: str) -> str:
    return f"{FILES}{file_id}/readers/{job}.json"


def _deleted(file_id: str) -> str:
    return f"{FILES}{file_id}/deleted"
