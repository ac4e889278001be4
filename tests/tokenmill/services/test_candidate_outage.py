"""Workers whose store is away for a while: a candidate, and a worker that changes its model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.models.shadow_results import ShadowCopies
from pipeline.ports import ShardTask, StoreUnavailable, World, queue_name
from schemas.jobs.job import Tier
from schemas.settings.settings import Settings
from tests.pipeline.models.releases_harness import RULES, ReleasesHarness
from tests.pipeline.simulation import MemoryStore
from tests.tokenmill.services.test_releases import another_version
from tests.waiting import wait_for
from tokenmill.root import Root
from tokenmill.services.backends import in_process_backends
from tokenmill.services.candidate_worker import CandidateWorker
from tokenmill.services.worker import WorkerService
from tokenmill.services.worker_process import entry_of
from workers.model.loaded_model import LoadedModel
from workers.policies.policy import NO_POLICIES


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
def harness(tmp_path: Path) -> ReleasesHarness:
    """A root whose store may be away, on the system's clock."""
    return ReleasesHarness(tmp_path, World(AwayStore(), SystemClock(), SystemRandomness(), tmp_path))


@pytest.mark.parametrize("when", ["waiting for a release", "working on copies"])
@pytest.mark.slow
def test_given_a_store_that_is_away_for_a_while_then_the_candidate_goes_on(
    when: str, harness: ReleasesHarness, model_folder: Path
) -> None:
    store: Any = harness.world.store
    config = EngineConfig(
        dtype="float32", max_model_len=32, cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4)
    )
    model = LoadedModel.load(model_folder, name="tiny", config=config)
    root = Root("memory:", harness.world, None)
    candidate = CandidateWorker(
        root, in_process_backends(root, Settings()), lambda: model, Settings(), 60.0, NO_POLICIES
    )
    harness.job("job-1", 2)
    entry = entry_of(model, NO_POLICIES, root)

    def begin() -> ShadowCopies:
        return ShadowCopies(store, harness.registry.begin("tiny", entry, RULES, harness.world.clock.now()))

    def outage() -> None:
        store.is_away, store.failures = True, 0
        wait_for(lambda: store.failures >= 3, "the store is not called again while it is away")
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
                harness.job("job-2", 3)
            outage()
            harness.job("job-3", 2)
            copies = copies or begin()
            wait_for(lambda: sum("job-3" in key for key in copies.standing()) == 2, "it does not go on")
        finally:
            stop.set()
            thread.join()
    assert errors == []
    waits = [line["event"] for line in logs if "the store can't be used" in line["event"]]
    assert waits, "the outage is logged"


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_given_a_store_that_is_away_when_a_model_is_changed_then_the_worker_waits_for_it(
    returns: bool, harness: ReleasesHarness, model_folder: Path, tmp_path: Path
) -> None:
    store: Any = harness.world.store
    config = EngineConfig(dtype="float32", max_model_len=32, schedule=ScheduleConfig(max_num_seqs=4))
    folders = {"first": model_folder, "second": another_version(model_folder, tmp_path / "second", noise=0.1)}
    loaded: list[str] = []

    def load(name: str) -> LoadedModel:
        loaded.append(name)
        store.is_away = loaded.count("second") == 2  # the first time, all models are loaded once
        return LoadedModel.load(folders[name], name=name, config=config)

    root = Root("memory:", harness.world, None)
    backends = in_process_backends(root, Settings())
    worker = WorkerService(root, backends, [lambda: load("first"), lambda: load("second")], Settings(), 60.0)
    pin = LoadedModel.load(folders["second"], name="second", config=config).pin()
    backends.queue.put(queue_name(pin.key, Tier.STANDARD), ShardTask("no-such-job", 1))
    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            worker(stop)
        except BaseException as error:
            errors.append(error)
            raise

    with capture_logs() as logs:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            wait_for(lambda: store.failures >= 2 or errors, "the store is not called while it is away")
            store.is_away = not returns
            if returns:
                turn = ("model's turn", "second")
                wait_for(
                    lambda: errors or turn in [(line["event"], line.get("model")) for line in logs],
                    "the model's turn does not begin",
                )
        finally:
            stop.set()
            thread.join()
    assert errors == []
