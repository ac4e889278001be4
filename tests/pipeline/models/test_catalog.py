"""The models of a root, as their workers publish them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.ledger.ledger import LedgerError
from pipeline.models.catalog import CATALOG, Catalog
from schemas.models import CatalogEntry
from tests.pipeline.made_jobs import PIN
from tests.pipeline.simulation import MemoryStore

ENTRY = CatalogEntry(pin=PIN, max_model_len=512, published_at=datetime(2026, 1, 31, tzinfo=UTC))


@pytest.mark.parametrize("left", [b"", b"\0" * 40, ENTRY.to_json()[:30]], ids=["nothing", "zeros", "a beginning"])
def test_given_an_entry_that_a_power_cut_tore_when_its_worker_comes_back_then_it_is_whole_again(left: bytes) -> None:
    store = MemoryStore()
    catalog = Catalog(store)
    catalog.publish(ENTRY)
    (key,) = [info.key for info in store.list(CATALOG)]
    store.replace(key, left)
    with pytest.raises(LedgerError, match=key):  # ingest waits: what is served isn't known
        catalog.find(PIN.name)

    catalog.publish(ENTRY)

    assert catalog.find(PIN.name) == ENTRY
    assert catalog.entries() == [ENTRY]


def test_given_an_entry_as_it_is_when_it_is_published_again_then_nothing_is_written() -> None:
    store = MemoryStore()
    Catalog(store).publish(ENTRY)
    before = dict(store.objects)
    Catalog(store).publish(ENTRY.model_copy(update={"published_at": ENTRY.published_at + timedelta(days=1)}))
    assert store.objects == before, "the time of the first publication stays"
    Catalog(store).publish(ENTRY.model_copy(update={"max_model_len": 64}))
    assert Catalog(store).entries() == [ENTRY.model_copy(update={"max_model_len": 64})]


def test_given_an_entry_without_its_moment_when_its_worker_comes_back_then_it_has_one() -> None:
    store = MemoryStore()
    Catalog(store).publish(ENTRY.model_copy(update={"published_at": None}))
    Catalog(store).publish(ENTRY)
    assert Catalog(store).find(PIN.name) == ENTRY
