"""A candidate whose store is away for a while: it keeps its model, and goes on with its copies by itself."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.ports import StoreUnavailable, World
from pipeline.releases.copies import ShadowCopies
from schemas.settings import Settings
from tests.pipeline.releases_house import RULES, ReleasesHouse
from tests.pipeline.simulation import MemoryStore
from tests.waiting import wait_for
from tokenmill.candidate import CandidateWorker
from tokenmill.hints import hints_in_process
from tokenmill.root import Root
from tokenmill.worker_process import entry_of
from workers.content_policies import NO_POLICIES
from workers.model_host import LoadedModel


class AwayStore(MemoryStore):
    """Counts the calls that fail while it is away."""

    is_away = False
    failures = 0

    def _fail(self) -> None:
        if self.is_away:
            self.failures += 1
            raise StoreUnavailable("the store is away")

    def create(self, key: str, data: bytes | Path) -> bool:
        self._fail()
        return super().create(key, data)

    def read(self, key: str) -> bytes:
        self._fail()
        return super().read(key)

    def folders(self, prefix: str) -> Any:
        self._fail()
        return super().folders(prefix)

    def list(self, prefix: str, after: str = "") -> Any:
        self._fail()
        return super().list(prefix, after)


@pytest.fixture
def house(tmp_path: Path) -> ReleasesHouse:
    """A root whose store may be away, on the system's clock."""
    return ReleasesHouse(tmp_path, World(AwayStore(), SystemClock(), SystemRandomness(), tmp_path))


@pytest.mark.parametrize("when", ["waiting for a release", "working on copies"])
def test_given_a_store_that_is_away_for_a_while_then_the_candidate_goes_on(
    when: str, house: ReleasesHouse, model_folder: Path
) -> None:
    store: Any = house.world.store
    config = EngineConfig(
        dtype="float32", max_model_len=32, cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4)
    )
    model = LoadedModel.load(model_folder, name="tiny", config=config)
    root = Root("memory:", house.world, None)
    candidate = CandidateWorker(root, hints_in_process(root), lambda: model, Settings(), 60.0, NO_POLICIES)
    house.job("job-1", 2)
    entry = entry_of(model, NO_POLICIES, root)

    def begin() -> ShadowCopies:
        return ShadowCopies(store, house.book.begin("tiny", entry, RULES, house.world.clock.now()))

    def outage() -> None:
        store.is_away, store.failures = True, 0
        wait_for(lambda: store.failures >= 3, "the store is not asked again while it is away")
        store.is_away = False

    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            candidate(stop)
        except BaseException as error:
            errors.append(error)
            raise

    with capture_logs() as logs:
        thread = threading.Thread(target=work)
        copies = begin() if when == "working on copies" else None
        thread.start()
        try:
            if copies is not None:
                wait_for(lambda: any(copies.standing()), "no copy is computed")
                house.job("job-2", 3)
            outage()
            house.job("job-3", 2)
            copies = copies or begin()
            wait_for(lambda: sum("job-3" in key for key in copies.standing()) == 2, "it does not go on")
        finally:
            stop.set()
            thread.join()
    assert errors == []
    waits = [line["event"] for line in logs if "the store can't be used" in line["event"]]
    assert waits, "the outage is logged"
