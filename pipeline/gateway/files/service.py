"""OpenAI files of tenants: uploads, and the output files of batches, as the gateway serves them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.gateway.files.file_objects import (
    content_key,
    deleted_key,
    find_file,
    objects_of,
    open_reader,
    reader_key,
    record_key,
    unmark_deleted,
)
from pipeline.gateway.http.errors import ApiError, not_found, unavailable
from pipeline.gateway.http.pagination import PageRequest, list_ids, map_chunks, take_page
from pipeline.gateway.limits.storage_quota import StorageQuota, StoredUsage
from pipeline.gateway.records import Reader, StoredFile, is_file_id, read_marker
from pipeline.gateway.response_models import File, ListPage, list_page
from pipeline.ledger.tenant_index import files_of
from pipeline.ports import ObjectNotFound, World
from schemas.jobs.batch import unix_time
from schemas.jobs.inputs import InputFile, InputRef

NO_QUOTA: Final = StorageQuota()

_AT_ONCE: Final = 16
_AFTER_MARKER: Final = "~"
"""An id with this suffix sorts after the id's marker."""


class Files:
    """The files of all tenants in `world.store`. Thread-safe.

    Args:
        executor: reads several files of a page in parallel.

    Attributes:
        usage: the storage that tenants use.
    """

    def __init__(self, world: World, executor: Executor) -> None:
        self._world = world
        self._store = world.store
        self._executor = executor
        self.usage = StoredUsage(world.store, world.clock)

    def add(self, file: StoredFile, content: Path, quota: StorageQuota = NO_QUOTA) -> StoredFile:
        """Store a file. `content` is the path of its bytes and is moved into the store. An existing file with this id
        is returned instead. Raises `ApiError` when it would exceed the quota."""
        existing = self._read(file.id)
        if existing is not None:
            content.unlink()
            return existing
        with self.usage.reserve(file.tenant, file.marker, file.size, quota):
            return self._add(file, content)

    def _add(self, file: StoredFile, content: Path) -> StoredFile:
        self._store.create(content_key(file.id), content)
        files_of(file.tenant).add(self._store, file.marker)
        created = self._store.create(record_key(file.id), file.to_json())
        existing = self._read(file.id)
        if existing is None:  # a deletion of its leftovers is in progress
            raise unavailable("the file can't be stored now; send it again")
        return file if created else existing

    def get(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """The tenant's file; raises `ApiError` (404)."""
        found = self._read(file_id) if is_file_id(file_id) else None
        if found is None or found.tenant != tenant or self._is_gone(found):
            raise not_found("file", file_id, param)
        return found

    def open(self, file: StoredFile) -> BinaryIO:
        """The file's bytes as a seekable stream; raises `ApiError` when they have just been removed."""
        try:
            return self._store.open(content_key(file.id))
        except ObjectNotFound as error:
            raise not_found("file", file.id) from error

    def page(self, tenant: str, page: PageRequest, purpose: str | None = None) -> ListPage[File]:
        """A page of the tenant's files; with `purpose`, only those with it. Markers hold the purpose, so only matching
        files are read."""

        def read(name: str) -> StoredFile | None:
            file_id = read_marker(name).id
            found = self._read(file_id) if is_file_id(file_id) else None
            if found is None:
                self._remove_orphan(tenant, name)
            return None if found is None or self._is_gone(found) else found

        after = page if page.after is None else replace(page, after=page.after + _AFTER_MARKER)
        names: Iterator[str] = list_ids(self._store, files_of(tenant), after)
        if purpose is not None:
            names = (name for name in names if read_marker(name).purpose == purpose)
        data, has_more = take_page(map_chunks(read, names, self._executor.map, _AT_ONCE), page.limit)
        return list_page([file_response(file) for file in data], has_more)

    def delete(self, tenant: str, file_id: str) -> StoredFile:
        """Remove the tenant's file; returns its metadata.

        Raises:
            ApiError: there is none (404), or an open batch reads it (409).
        """
        file = self.get(tenant, file_id)
        reader = self._open_reader(file_id)
        if reader is None:
            self._store.create(deleted_key(file_id), b"")
            reader = self._open_reader(file_id)  # one that was added meanwhile may not have seen the tombstone
            if reader is None:
                self._remove(file)
                self.usage.subtract(tenant, file.size)
                return file
            self._store.delete(deleted_key(file_id))
        raise ApiError(
            409,
            "file_in_use",
            f"batch {reader} reads file {file_id}; delete it when the batch has ended, or cancel the batch",
            param="file_id",
        )

    def as_input(self, file: StoredFile) -> InputRef:
        """The file as the input of a job."""
        uri = self._store.locate(content_key(file.id))
        return InputRef(uri=uri, format=file.format, files=(InputFile(uri=uri, size=file.size, sha256=file.sha256),))

    def add_reader(self, file: StoredFile, job: str) -> None:
        """Record that a job, which is about to be created, reads the file; raises `ApiError` when the file is gone."""
        self._store.create(reader_key(file.id, job), Reader(at=self._world.clock.now()).to_json())
        if self._read(file.id) is None:
            self.remove_reader(file.id, job)
            raise not_found("file", file.id, "input_file_id")

    def remove_reader(self, file_id: str, job: str) -> None:
        """Remove the reader record of a job that isn't created."""
        self._store.delete(reader_key(file_id, job))

    def _read(self, file_id: str) -> StoredFile | None:
        """The file, unless it is missing or deleted."""
        found = find_file(self._store, file_id)
        return None if found is None or self._store.info(deleted_key(file_id)) is not None else found

    def _is_gone(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._world.clock.now()

    def _open_reader(self, file_id: str) -> str | None:
        return open_reader(self._store, file_id, self._world.clock.now())

    def _remove_orphan(self, tenant: str, marker: str) -> None:
        """Remove the marker of an interrupted upload whose content is garbage-collected: it would count against the
        quota forever. A file that is being stored has content before it has a marker."""
        file_id = read_marker(marker).id
        if self._store.info(content_key(file_id)) is None and self._store.info(record_key(file_id)) is None:
            for key in files_of(tenant).keys(marker):
                self._store.delete(key)

    def _remove(self, file: StoredFile) -> None:
        for key in objects_of(self._store, file):
            self._store.delete(key)
        unmark_deleted(self._store, file.id)


def file_response(file: StoredFile) -> File:
    """The file as OpenAI's file object."""
    return File(
        id=file.id,
        bytes=file.size,
        created_at=int(file.created_at.timestamp()),
        expires_at=unix_time(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
    )
