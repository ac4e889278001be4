"""Finds the gateway's objects to remove: expired files, interrupted removals, unfinished uploads, and old idempotency
records."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from pipeline.gateway.files.file_objects import (
    find_file,
    is_deleted,
    mark_deleted,
    objects_of,
    open_reader,
    unmark_deleted,
)
from pipeline.gateway.records import FILES, IdempotencyRecord
from pipeline.jobs.submit import id_moment
from pipeline.ledger.ledger import parse_stored
from pipeline.ledger.tenant_index import TENANTS
from pipeline.ports import ObjectInfo, ObjectNotFound, ObjectStore


def expired_files(
    store: ObjectStore, now: datetime, unfinished_retention: timedelta, dry_run: bool
) -> Iterator[ObjectInfo]:
    """Objects of expired files, in the order in which they must be removed. A file that an open job reads stays.

    Args:
        unfinished_retention: retention of unfinished uploads.
        dry_run: change nothing; else a file is marked as deleted before its first object is yielded.
    """
    for folder in store.folders(FILES):
        file_id = folder.removeprefix(FILES).rstrip("/")
        file = find_file(store, file_id)
        if file is None:
            if _is_left_over(store, file_id, now - unfinished_retention, dry_run):
                yield from [info for info in store.list(folder) if not info.key.endswith("/deleted")]
                _end(store, file_id, dry_run)
            continue
        marked = is_deleted(store, file_id)
        if not marked and (file.expires_at is None or file.expires_at > now):
            continue
        if open_reader(store, file_id, now) is not None:
            continue
        if not marked and not dry_run:
            mark_deleted(store, file_id)
            if open_reader(store, file_id, now) is not None:  # it began meanwhile
                unmark_deleted(store, file_id)
                continue
        found = (store.info(key) for key in objects_of(store, file))
        yield from [info for info in found if info is not None]
        _end(store, file_id, dry_run)


def _end(store: ObjectStore, file_id: str, dry_run: bool) -> None:
    if not dry_run:
        unmark_deleted(store, file_id)


def _is_left_over(store: ObjectStore, file_id: str, before: datetime, dry_run: bool) -> bool:
    """Whether the folder is left over from an upload that will never complete. The folder is marked first and checked
    again afterwards: an upload that has just written `file.json` sees the mark."""
    if is_deleted(store, file_id):
        return True
    began = id_moment(file_id)
    if began is None or began > before:
        return False
    if not dry_run:
        mark_deleted(store, file_id)
        if find_file(store, file_id) is not None:
            unmark_deleted(store, file_id)
            return False
    return True


def old_idempotency_records(store: ObjectStore, before: datetime) -> Iterator[ObjectInfo]:
    """Idempotency records that are so old that their requests are not repeated any more."""
    for tenant in store.folders(TENANTS):
        for info in list(store.list(f"{tenant}idempotency/")):
            try:
                record = parse_stored(store.locate(info.key), store.read(info.key), IdempotencyRecord)
            except ObjectNotFound:
                continue
            if record.at <= before:
                yield info
