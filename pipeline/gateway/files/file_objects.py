"""The objects of stored files: what there is of one, whether it is deleted, and which job reads it.

A file exists once its `file.json` is written, which is the last step of an upload. A deletion first writes a tombstone
(`deleted`), which hides the file, and then removes its objects, with `file.json` and the tombstone last. So any process
can complete an interrupted upload or deletion.

A job reads its input file for as long as it is open. Before a job is created it writes a reader record, and then checks
that the file still exists; a deletion writes the tombstone, and then checks for readers. So one of the two always sees
the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from pipeline.gateway.records import FILES, Reader, StoredFile
from pipeline.ledger.ledger import JOBS, JobLedger, parse_stored
from pipeline.ledger.tenant_index import files_of
from pipeline.ports import ObjectNotFound, ObjectStore

READER_GRACE_PERIOD: Final = timedelta(hours=1)
"""A reader record without a job is ignored after this time: its job was never created."""


def find_file(store: ObjectStore, file_id: str) -> StoredFile | None:
    """The metadata of a file, even when it is marked as deleted. Raises `LedgerError` for a damaged record."""
    try:
        data = store.read(record_key(file_id))
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(record_key(file_id)), data, StoredFile)


def is_deleted(store: ObjectStore, file_id: str) -> bool:
    """Whether the file has a tombstone, so that its removal has begun."""
    return store.info(deleted_key(file_id)) is not None


def mark_deleted(store: ObjectStore, file_id: str) -> None:
    """Write the file's tombstone, which hides it."""
    store.create(deleted_key(file_id), b"")


def unmark_deleted(store: ObjectStore, file_id: str) -> None:
    """Remove the file's tombstone, when it is not deleted after all or is removed completely."""
    store.delete(deleted_key(file_id))


def open_reader(store: ObjectStore, file_id: str, now: datetime) -> str | None:
    """A job that reads the file and is open or about to be created; None: there is none."""
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
    """The keys of the file's objects in the order of their removal; the tombstone is removed after them."""
    yield content_key(file.id)
    yield from [info.key for info in store.list(f"{FILES}{file.id}/readers/")]
    yield from files_of(file.tenant).keys(file.marker)
    yield record_key(file.id)


def content_key(file_id: str) -> str:
    """The file's bytes."""
    return f"{FILES}{file_id}/content"


def record_key(file_id: str) -> str:
    """Its metadata; writing it commits the file."""
    return f"{FILES}{file_id}/file.json"


def reader_key(file_id: str, job: str) -> str:
    """The record of a job that reads the file."""
    return f"{FILES}{file_id}/readers/{job}.json"


def deleted_key(file_id: str) -> str:
    """Its tombstone."""
    return f"{FILES}{file_id}/deleted"


def _is_beginning(store: ObjectStore, key: str, now: datetime) -> bool:
    try:
        reader = parse_stored(store.locate(key), store.read(key), Reader)
    except ObjectNotFound:
        return False
    return reader.at + READER_GRACE_PERIOD > now
