"""A page reads only its length, in either order, for any number of a tenant's objects."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.pagination import PageRequest
from pipeline.gateway.records import StoredFile, new_file_id
from pipeline.jobs.submit import new_job_id, submit
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ledger.tenant_index import TenantIndex, files_of
from pipeline.ports import ObjectInfo, World
from pipeline.runtime.inline_executor import InlineExecutor
from tests.pipeline.made_jobs import order as order_of
from tests.pipeline.simulation import MemoryStore

MANY = 20_000
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", fullmatch=True)
Order = Literal["asc", "desc"]


class CountingStore(MemoryStore):
    """Counts listings, listed objects, and objects that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.listings = self.listed = self.reads = 0

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.listings += 1
        for info in super().list(prefix, after):
            self.listed += 1
            yield info

    def read(self, key: str) -> bytes:
        self.reads += 1
        return super().read(key)


@pytest.fixture(scope="module")
def stored() -> tuple[CountingStore, list[str]]:
    """A store in which a tenant has very many files, and their ids, the oldest first."""
    store, numbers = CountingStore(), count()

    class Numbered:
        def token(self, size: int) -> bytes:
            return next(numbers).to_bytes(size, "big")

    made = []
    for number in range(MANY):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
        file = StoredFile(
            id=new_file_id(at, Numbered()), tenant="acme", filename="x", purpose="batch", size=2, sha256="0" * 64,
            created_at=at,
        )  # fmt: skip
        files_of(file.tenant).add(store, file.marker)
        store.create(f"files/{file.id}/file.json", file.to_json())
        made.append(file.id)
    return store, made


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("behind", [None, 0, MANY // 2, MANY - 8])
@pytest.mark.slow
def test_a_page_of_a_large_index_reads_only_its_length(
    world: World, stored: tuple[CountingStore, list[str]], order: Order, behind: int | None
) -> None:
    store, made = stored
    ids = made if order == "asc" else made[::-1]
    with ThreadPoolExecutor(1) as executor:
        files = Files(replace(world, store=store), executor)
        store.listings = store.listed = store.reads = 0
        page = files.page("acme", PageRequest(20, None if behind is None else ids[behind], order))
    first = 0 if behind is None else behind + 1
    assert [one.id for one in page.data] == ids[first : first + 20]
    assert page.has_more is (first + 20 < MANY)
    assert store.listings == 1
    assert store.listed <= 40
    assert store.reads <= 40


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.slow
def test_a_page_of_batches_has_the_same_cost_for_any_number_of_batches(world: World, order: Order) -> None:
    store = CountingStore()
    world = replace(world, store=store)
    unused: Any = None
    made: list[str] = []
    costs = []
    for many in (40, 400):
        while len(made) < many:
            world.clock.sleep(1.0)
            name = new_job_id(world.clock.now(), world.random)
            submit(order_of(tenant="acme"), JobLedger(store, f"{JOBS}{name}/"), world, job_id=name)
            made.append(name)
        ids = made if order == "asc" else made[::-1]
        batches = Batches(world, unused, unused, unused, InlineExecutor())  # a thread reads ahead as far as it comes
        store.listings = store.listed = store.reads = 0
        page = batches.page("acme", PageRequest(5, ids[20], order))
        assert [one.id for one in page.data] == ids[21:26]
        assert page.has_more
        costs.append((store.listings, store.listed, store.reads))
    assert costs[0] == costs[1]


@pytest.mark.slow
@given(names=st.lists(NAMES, unique=True, max_size=20), after=st.none() | NAMES)
@example(names=["a", "ab", "ab.", "aB", "y", "yy", "-".join("zz")], after="ab")
@example(names=["job-1", "job-10", "job-2"], after="job-1")
def test_the_two_orders_are_each_others_reverse_for_any_ids(names: list[str], after: str | None) -> None:
    store, shelf = MemoryStore(), TenantIndex("tenants/t-a/", "batches")
    for name in names:
        shelf.add(store, name)
    assert list(shelf.newest(store)) == sorted(names)
    assert list(shelf.oldest(store)) == sorted(names, reverse=True)
    if after is not None:
        assert list(shelf.newest(store, after)) == [name for name in sorted(names) if name > after]
        assert list(shelf.oldest(store, after)) == [name for name in sorted(names, reverse=True) if name < after]
    for name in names:
        for key in shelf.keys(name):
            store.delete(key)
    assert not store.objects
