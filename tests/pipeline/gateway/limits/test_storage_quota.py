"""Storage quotas of tenants: refused with OpenAI's error, and counted without a listing for each upload."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from pipeline.gateway.files.service import Files
from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.http.auth import Caller
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.http.pagination import PageRequest
from pipeline.gateway.limits.admission import RateLimiter, RateSettings
from pipeline.gateway.limits.storage_quota import NEAR_REFRESH_SECONDS, REFRESH_SECONDS, StorageQuota
from pipeline.gateway.records import StoredFile, new_file_id
from pipeline.ledger.tenant_index import files_of
from pipeline.ports import ObjectInfo, World
from schemas.requests.limits import RateLimits
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.pipeline.simulation import MemoryStore
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"


class CountingStore(MemoryStore):
    """Counts listings and reads."""

    listings = 0
    reads = 0

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.listings += 1
        return super().list(prefix, after)

    def read(self, key: str) -> bytes:
        self.reads += 1
        return super().read(key)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def counted(world: World, store: CountingStore) -> World:
    return replace(world, store=store)


def gateway(world: World) -> Files:
    return Files(world, ThreadPoolExecutor(1))


def upload(files: Files, world: World, folder: Path, size: int, quota: StorageQuota, purpose: str = "batch") -> str:
    content = folder / "content"
    content.write_bytes(b"x" * size)
    now = world.clock.now()
    made = StoredFile(
        id=new_file_id(now, world.random), tenant="a", filename="x", purpose=purpose, size=size,  # type: ignore[arg-type]
        sha256="0" * 64, created_at=now,
    )  # fmt: skip
    return files.add(made, content, quota).id


def refusal(files: Files, world: World, folder: Path, size: int, quota: StorageQuota) -> ApiError:
    with pytest.raises(ApiError) as refused:
        upload(files, world, folder, size, quota)
    assert (refused.value.status, refused.value.code) == (400, "storage_quota_exceeded")
    return refused.value


@pytest.mark.slow
def test_an_upload_above_the_quota_is_refused_until_files_are_deleted(tmp_path: Path) -> None:
    content = lines(4)
    limits = RateLimits(stored_bytes=2 * len(content), stored_files=4)
    with run_http_harness(tmp_path, rates=RateSettings(tenants={"a": limits})) as harness:
        ours, theirs = (harness.client(harness.keys.create(tenant, tuple(Scope))[1]) for tenant in "ab")
        first = ours.files.create(file=("1.jsonl", content), purpose="batch")
        second = ours.files.create(file=("2.jsonl", content), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="exceeded your file storage quota") as refused:
            ours.files.create(file=("3.jsonl", content), purpose="batch")
        assert (refused.value.code, refused.value.type) == ("storage_quota_exceeded", "invalid_request_error")
        assert len(ours.files.list().data) == 2, "nothing is left of it"
        theirs.files.create(file=("1.jsonl", content * 10), purpose="batch")
        ours.files.delete(first.id)
        batch = ours.batches.create(input_file_id=second.id, endpoint=CHAT, completion_window="24h")
        wait_for(lambda: ours.batches.retrieve(batch.id).status == "completed", "it did not end")
        with pytest.raises(openai.BadRequestError, match="file storage quota"):  # results count, and are always stored
            ours.files.create(file=("3.jsonl", content), purpose="batch")
        for file in ours.files.list().data:
            ours.files.delete(file.id)
        once = {"Idempotency-Key": "once"}
        made = [ours.files.create(file=("x", content * 2), purpose="batch", extra_headers=once).id for _ in range(2)]
        assert made[0] == made[1], "the same upload again is refused by no quota"


def test_uploads_list_markers_at_an_interval_and_read_no_files(
    counted: World, store: CountingStore, tmp_path: Path
) -> None:
    files, quota = gateway(counted), StorageQuota(max_bytes=10_000, max_files=1_000)
    for _ in range(50):
        upload(files, counted, tmp_path, 100, quota)
    assert store.listings == 1
    counted.clock.sleep(REFRESH_SECONDS)
    store.reads = 0
    files.usage.check("a", 1, quota)
    assert (store.listings, store.reads) == (2, 0)
    for _ in range(50):
        upload(files, counted, tmp_path, 100, quota)
    error = refusal(files, counted, tmp_path, 1, quota)
    assert "10,000 of 10,000 bytes are stored, and the file has 1" in error.message
    assert store.listings <= 3


def test_gateways_count_files_that_others_store_and_remove(counted: World, tmp_path: Path) -> None:
    one, two, quota = gateway(counted), gateway(counted), StorageQuota(max_files=2)
    upload(one, counted, tmp_path, 1, quota)
    removed = upload(two, counted, tmp_path, 1, quota)
    counted.clock.sleep(NEAR_REFRESH_SECONDS)
    assert "2 files are stored, and 2 may be" in refusal(one, counted, tmp_path, 1, quota).message
    two.delete("a", removed)
    counted.clock.sleep(NEAR_REFRESH_SECONDS)
    upload(one, counted, tmp_path, 1, quota)


def test_a_file_in_upload_counts_even_during_a_listing(
    counted: World, store: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, quota, create = gateway(counted), StorageQuota(100), store.create

    def slow(key: str, data: bytes | Path) -> bool:
        counted.clock.sleep(REFRESH_SECONDS)
        with pytest.raises(ApiError, match="60 of 100 bytes are stored"):
            files.usage.check("a", 60, quota)
        return create(key, data)

    with monkeypatch.context() as planted:
        planted.setattr(store, "create", slow)
        upload(files, counted, tmp_path, 60, quota)
    files.usage.check("a", 40, quota)
    with pytest.raises(ApiError, match="60 of 100 bytes are stored"):
        files.usage.check("a", 41, quota)


def test_a_marker_of_an_interrupted_upload_is_removed_when_files_are_listed(counted: World, tmp_path: Path) -> None:
    files, quota = gateway(counted), StorageQuota(max_files=1)
    files_of("a").add(counted.store, f"{new_file_id(counted.clock.now(), counted.random)}.batch.5")
    refusal(files, counted, tmp_path, 1, quota)
    assert not files.page("a", PageRequest()).data
    counted.clock.sleep(NEAR_REFRESH_SECONDS)
    upload(files, counted, tmp_path, 1, quota)


def test_a_page_with_a_purpose_reads_no_other_files(counted: World, store: CountingStore, tmp_path: Path) -> None:
    files, none = gateway(counted), StorageQuota()
    for number in range(100):
        counted.clock.sleep(1.0)
        upload(files, counted, tmp_path, 1, none, "batch" if number in (3, 50, 97) else "batch_output")
    for order in ("asc", "desc"):
        store.reads = 0
        first = files.page("a", PageRequest(2, order=order), "batch")  # type: ignore[arg-type]
        last = files.page("a", PageRequest(2, first.data[-1].id, order), "batch")  # type: ignore[arg-type]
        assert (len(first.data), first.has_more, len(last.data), last.has_more) == (2, True, 1, False)
        assert len({one.id for one in (*first.data, *last.data)}) == 3
        assert store.reads <= 5


def test_tenants_with_keys_have_a_quota_unless_one_is_set(world: World) -> None:
    settings = RateSettings(
        default_stored=StorageQuota(100, 10), tenants={"big": RateLimits(stored_bytes=1_000)},
        key=RateLimits(stored_files=7),
    )  # fmt: skip
    limiter = RateLimiter(world.clock, settings)

    def quota(tenant: str, key: str | None = "0" * 16, **own: int) -> StorageQuota:
        return limiter.storage_quota(Caller(tenant, frozenset(Scope), key, limits=RateLimits(**own)))

    assert quota("a") == StorageQuota(100, 7)
    assert quota("big", stored_files=3) == StorageQuota(1_000, 3)
    assert quota("a", None) == StorageQuota()
