"""When a file is deleted while a job with it is created, one of the two succeeds, or neither; never both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.gateway.files.file_objects import READER_GRACE_PERIOD
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.records import StoredFile, new_file_id
from pipeline.ports import World
from tests.pipeline.simulation import MemoryStore, SimulatedClock


class InterruptedStore(MemoryStore):
    """A store that calls a function before one of its creations."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], object]] = {}

    def create(self, key: str, data: bytes | Path) -> bool:
        for part, act in list(self.before.items()):
            if part in key:
                del self.before[part]
                act()
        return super().create(key, data)


@pytest.fixture
def store() -> InterruptedStore:
    return InterruptedStore()


@pytest.fixture
def files(world: World, store: InterruptedStore) -> Files:
    return Files(replace(world, store=store), ThreadPoolExecutor(1))


@pytest.fixture
def stored(world: World, files: Files, tmp_path: Path) -> StoredFile:
    path = tmp_path / "content"
    path.write_bytes(b"{}")
    now = world.clock.now()
    return files.add(
        StoredFile(
            id=new_file_id(now, world.random), tenant="a", filename="x", purpose="batch", size=2, sha256="0" * 64,
            created_at=now,
        ),
        path,
    )  # fmt: skip


def test_a_job_created_between_two_reader_checks_prevents_the_deletion_of_its_file(
    files: Files, store: InterruptedStore, stored: StoredFile
) -> None:
    store.before["/deleted"] = lambda: files.add_reader(stored, "job-1")
    with pytest.raises(ApiError, match="job-1 reads file"):
        files.delete("a", stored.id)
    assert files.get("a", stored.id) == stored
    assert files.open(stored).read() == b"{}"


def test_a_job_is_not_created_when_its_file_is_deleted_before_its_reader_record(
    files: Files, store: InterruptedStore, stored: StoredFile
) -> None:
    store.before["/readers/"] = lambda: files.delete("a", stored.id)
    with pytest.raises(ApiError) as refused:
        files.add_reader(stored, "job-1")
    assert (refused.value.status, refused.value.param) == (404, "input_file_id")
    assert not store.objects


def test_an_interrupted_removal_is_invisible_and_reader_records_without_a_job_expire(
    files: Files, store: InterruptedStore, stored: StoredFile, world: World
) -> None:
    files.add_reader(stored, "job-1")
    with pytest.raises(ApiError):
        files.delete("a", stored.id)
    assert isinstance(world.clock, SimulatedClock)
    world.clock.sleep(READER_GRACE_PERIOD.total_seconds())
    store.create(f"files/{stored.id}/deleted", b"")
    with pytest.raises(ApiError):
        files.get("a", stored.id)
    store.delete(f"files/{stored.id}/deleted")
    files.delete("a", stored.id)
    assert not store.objects
