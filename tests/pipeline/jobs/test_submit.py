"""Submission: the same order finds its job, another order is refused, `fresh` starts anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.inputs.pinning import WatchedInput, pin_input
from pipeline.jobs.submit import DifferentJob, SubmittedJob, clear, new_job_id, submit
from pipeline.ledger.ledger import JobLedger, LedgerError
from pipeline.planner import InputError
from pipeline.ports import World
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.outcome import JobStatus
from schemas.models import ModelPin
from tests.pipeline.made_jobs import PIN, end_job, order, plan_by_hand
from tests.pipeline.simulation import START, SeededRandomness


@pytest.fixture
def ledger(world: World) -> JobLedger:
    return JobLedger(world.store)


def input_of(sha256: str, uri: str = "/data/in.jsonl") -> InputRef:
    return InputRef(uri=uri, format=InputFormat.JSONL, files=(InputFile(uri=uri, size=10, sha256=sha256),))


def test_an_order_becomes_a_job_that_pins_everything(world: World, ledger: JobLedger) -> None:
    wanted = order(tier=Tier.BULK, tenant="acme", deadline=START + timedelta(hours=1), metadata={"team": "search"})
    submitted = submit(wanted, ledger, world)
    assert submitted.created
    job = ledger.job()
    assert job == submitted.job
    assert (job.tier, job.tenant, job.deadline, job.metadata) == (
        Tier.BULK, "acme", START + timedelta(hours=1), {"team": "search"},
    )  # fmt: skip
    assert (job.input, job.models, job.settings) == (wanted.input, wanted.models, wanted.settings)
    assert ledger.status() is JobStatus.VALIDATING


def test_the_same_order_again_finds_its_job(world: World, ledger: JobLedger) -> None:
    first = submit(order(), ledger, world)
    again = submit(order(), ledger, world)
    assert (again.job, again.created) == (first.job, False)


def test_the_same_bytes_elsewhere_are_the_same_input_and_are_read_there(world: World, ledger: JobLedger) -> None:
    first = submit(order(), ledger, world)
    moved = input_of("0" * 64, uri="/new/place.jsonl")
    again = submit(order(input=moved), ledger, world)
    assert again.job.id == first.job.id
    assert again.job.input == moved


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"input": input_of("1" * 64)}, f"input.sha256 was {'0' * 64}, now {'1' * 64}"),
        ({"settings": JobSettings(seed=7)}, "settings.seed was 0, now 7"),
        ({"settings": JobSettings(limit=9)}, "settings.limit was None, now 9"),
        ({"tier": Tier.BULK}, "tier was standard, now bulk"),
        ({"tenant": "other"}, "tenant was default, now other"),
        ({"metadata": {"a": "b"}}, "metadata.a was absent, now b"),
        (
            {"models": (ModelPin(name="tiny", source="/models/tiny", digest="sha256:2", dtype="bfloat16"),)},
            "model.digest was sha256:1, now sha256:2; model.dtype was float32, now bfloat16",
        ),
        (
            {"models": (ModelPin(name="other", source="/models/tiny", digest="sha256:1", dtype="float32"),)},
            "model.name was tiny, now other",
        ),
        ({"models": (PIN, PIN.with_adapter("legal", "/adapters/legal", "3"))}, "models was tiny, now tiny, legal"),
    ],
)
def test_another_order_is_refused_with_exactly_the_difference(
    world: World, ledger: JobLedger, changes: dict[str, Any], difference: str
) -> None:
    first = submit(order(), ledger, world).job
    with pytest.raises(DifferentJob) as caught:
        submit(order(**changes), ledger, world)
    assert f"holds job {first.id} of another order: {difference}; choose another output or pass --fresh" in str(
        caught.value
    )
    assert ledger.job() == first


def test_a_deadline_given_as_an_amount_of_time_is_counted_once(world: World, ledger: JobLedger) -> None:
    world.clock.sleep(60.0)
    first = submit(order(deadline=timedelta(hours=6)), ledger, world).job
    assert first.deadline == START + timedelta(hours=6, minutes=1)
    world.clock.sleep(3600.0)
    again = submit(order(deadline=timedelta(hours=6)), ledger, world)
    assert (again.created, again.job.deadline) == (False, first.deadline)
    for other, difference in (
        (timedelta(hours=7), "deadline was 6:00:00 after acceptance, now 7:00:00 after acceptance"),
        (None, f"deadline was {(START + timedelta(hours=6, minutes=1)).isoformat()}, now None"),
    ):
        with pytest.raises(DifferentJob) as caught:
            submit(order(deadline=other), ledger, world)
        assert difference in str(caught.value)


def test_a_deadline_given_as_a_time_is_compared_as_it_is(world: World, ledger: JobLedger) -> None:
    submit(order(deadline=START + timedelta(hours=1)), ledger, world)
    world.clock.sleep(60.0)
    assert not submit(order(deadline=START + timedelta(hours=1)), ledger, world).created
    with pytest.raises(DifferentJob, match=r"deadline was .* now "):
        submit(order(deadline=START + timedelta(hours=2)), ledger, world)


def test_the_same_weights_in_another_folder_are_the_same_model(world: World, ledger: JobLedger) -> None:
    first = submit(order(), ledger, world)
    moved = (ModelPin(name="tiny", source="/moved/tiny", digest="sha256:1", dtype="float32"),)
    assert submit(order(models=moved), ledger, world).job.id == first.job.id


def test_fresh_forgets_the_old_job_and_only_that(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FolderStore(out) as store:
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store)
        old = plan_by_hand(ledger, world, [[0]], rejected=[1])
        (out / "notes.txt").write_text("mine")
        new = submit(order(tier=Tier.BULK), ledger, world, fresh=True)
        assert new.created
        assert new.job.id != old.id
        assert ledger.job().tier is Tier.BULK
        assert list(ledger.parts()) == []
        assert list(ledger.segments()) == []
    assert (out / "notes.txt").read_text() == "mine"
    left = sorted(path.name for path in out.rglob("*") if path.is_file())
    assert [name for name in left if not name.endswith(".json")] == ["notes.txt"]
    assert len(left) == 3, "the notes, the new job and the record of its run"


def test_an_interrupted_clearing_leaves_a_job_that_can_be_cleared_again(world: World, ledger: JobLedger) -> None:
    plan_by_hand(ledger, world, [[0], [1]], rejected=[2])

    class PowerCut(Exception):
        pass

    class FailingStore:
        def __init__(self, after: int) -> None:
            self.left = after

        def __getattr__(self, name: str) -> Any:
            return getattr(world.store, name)

        def delete(self, key: str) -> None:
            if not self.left:
                raise PowerCut
            self.left -= 1
            world.store.delete(key)

    total = sum(1 for _ in world.store.list(""))
    for after in range(1, total):
        store: Any = FailingStore(after % 3)
        with pytest.raises(PowerCut):
            clear(JobLedger(store))
        ledger.job()
        ledger.status()
        if sum(1 for _ in world.store.list("")) <= 1:
            break
    submitted = submit(order(), ledger, world, fresh=True)
    assert submitted.created
    assert list(ledger.parts()) == []


def test_results_of_no_known_job_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    foreign = tmp_path / "results" / "part-00000.parquet"
    foreign.write_bytes(b"someone's table")
    with FolderStore(tmp_path) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        for fresh in (False, True):
            with pytest.raises(LedgerError, match=r"results/part-00000.parquet: belongs to no job"):
                submit(order(), JobLedger(store), world, fresh=fresh)
    assert foreign.read_bytes() == b"someone's table"


def test_a_foreign_file_among_the_results_is_refused(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        submit(order(), JobLedger(store), world)
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "other.parquet").write_bytes(b"x")
        for fresh in (False, True):
            with pytest.raises(LedgerError, match=r"other.parquet: is not tokenmill's"):
                submit(order(), JobLedger(store), world, fresh=fresh)
    assert (tmp_path / "results" / "other.parquet").exists()


def test_a_job_that_was_refused_as_a_whole_does_not_stand_in_the_way(world: World, ledger: JobLedger) -> None:
    submit(order(), ledger, world)
    end_job(ledger, START, JobStatus.FAILED)
    corrected = submit(order(input=input_of("2" * 64)), ledger, world)
    assert corrected.created
    assert ledger.manifest() is None


def test_of_many_concurrent_submits_one_makes_the_job(tmp_path: Path) -> None:
    barrier = threading.Barrier(6)

    def submit_once(_: int) -> SubmittedJob:
        with FolderStore(tmp_path / "out") as store:
            world = World(store, SystemClock(), SystemRandomness(), store.scratch)
            barrier.wait()
            return submit(order(), JobLedger(store), world)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(submit_once, range(6)))
    assert [outcome.created for outcome in outcomes].count(True) == 1
    assert len({outcome.job.id for outcome in outcomes}) == 1


def test_ids_sort_newest_first() -> None:
    random = SeededRandomness()
    moments = [START + timedelta(milliseconds=step) for step in (0, 1, 2, 1000, 10**6, 10**9, 10**11)]
    ids = [new_job_id(moment, random) for moment in moments]
    assert sorted(ids, reverse=True) == ids


def test_pinning_hashes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"bb\n")
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "README").write_bytes(b"x")
    pinned = pin_input(tmp_path)
    assert [Path(file.uri).name for file in pinned.files] == ["a.jsonl", "b.jsonl"]
    assert [file.size for file in pinned.files] == [0, 3]
    assert pinned.files[0].sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (single,) = pin_input(tmp_path / "b.jsonl").files
    assert single == pinned.files[1]


def test_an_input_that_is_missing_or_changed_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        pin_input(tmp_path / "none.jsonl")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n")
    (source,) = WatchedInput(pin_input(path)).files()
    path.write_bytes(b"12\n")
    with pytest.raises(InputError, match=r"has 3 bytes, but had 2 .*--fresh"):
        source.open()
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        source.open()
