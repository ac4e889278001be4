"""Results as OpenAI batch output lines, and listings of a store's jobs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.jobs.summaries import find_ledger, list_jobs, summarize_job
from pipeline.ledger.ledger import JobLedger, JobNotFound
from pipeline.ports import StoreError, World
from pipeline.results.export import export
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import MODELS, computed, plan_by_hand, report
from tests.pipeline.simulation import MemoryStore, simulated_world


def compute(world: World, ledger: JobLedger, most: int = 10**9) -> None:
    """Commit `most` shards of a planned job."""
    queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 10.0)
    dispatcher = Dispatcher(world, queue, beats)
    dispatcher.add(ledger)
    client = ShardClient("w", world, lambda _: ledger, queue, beats, dispatcher.finished, models=MODELS)
    while not dispatcher.finished() and most:
        dispatcher.tick()
        while most and (work := client.take(0)) is not None:
            client.commit(work, computed(work), report(work))
            most -= 1


def random_shards(count: int, rows_each: int, first: int) -> list[list[int]]:
    rows = list(range(first, first + count * rows_each))
    random.Random(3).shuffle(rows)
    return [rows[start : start + rows_each] for start in range(0, len(rows), rows_each)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "scratch").mkdir()
    return simulated_world(tmp_path / "scratch")


def test_lines_have_openais_shape(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[1, 3, 4]], rejected=[0, 2])
    compute(world, ledger)
    counts = export(ledger, tmp_path / "all.jsonl", in_input_order=True)
    assert (counts.succeeded, counts.others) == (2, 3)
    refused, good, _, _, failed = lines_of(tmp_path / "all.jsonl")
    assert good["custom_id"] == "id-1"
    assert good["response"]["status_code"] == 200
    assert good["response"]["body"] == {"id": "r1"}
    assert good["response"]["request_id"].startswith("req_")
    assert good["error"] is None
    assert (refused["custom_id"], refused["response"]) == (None, None)
    assert refused["error"] == {"code": "invalid_json", "message": "line 1 of the input: not JSON"}
    assert (failed["custom_id"], failed["error"]["code"]) == ("id-4", "context_length_exceeded")
    ids = [line["id"] for line in lines_of(tmp_path / "all.jsonl")]
    assert len(set(ids)) == 5
    assert all(name.startswith("batch_req_") for name in ids)


def test_exporting_twice_gives_the_same_bytes(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, random_shards(3, 4, 0))
    compute(world, ledger)
    for name in ("one", "two"):
        export(ledger, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("shards", [1, 3, 4, 9, 10, 28])
@pytest.mark.slow
def test_results_are_in_input_order_however_many_parts_there_are(world: World, tmp_path: Path, shards: int) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, random_shards(shards, 2, 3), rejected=[0, 1, 2])
    compute(world, ledger)
    counts = export(ledger, tmp_path / "out.jsonl", in_input_order=True, fan_in=3)
    lines = lines_of(tmp_path / "out.jsonl")
    assert counts.succeeded + counts.others == len(lines) == 2 * shards + 3
    assert [line["custom_id"] for line in lines[3:]] == [f"id-{row}" for row in range(3, 3 + 2 * shards)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "scratch"]


class CountingStore(MemoryStore):
    """A store that counts its open objects."""

    most_open = 0

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self._streams: list[BinaryIO] = []

    def open(self, key: str) -> BinaryIO:
        self._streams = [stream for stream in self._streams if not stream.closed] + [super().open(key)]
        self.most_open = max(self.most_open, len(self._streams))
        return self._streams[-1]


def test_never_more_parts_are_open_than_the_fan_in(world: World, tmp_path: Path) -> None:
    plan_by_hand(JobLedger(world.store), world, random_shards(13, 1, 0))
    compute(world, JobLedger(world.store))
    assert isinstance(world.store, MemoryStore)
    store = CountingStore(world.store.objects)
    export(JobLedger(store), tmp_path / "out.jsonl", in_input_order=True, fan_in=3)
    assert store.most_open == 3


def test_errors_can_go_to_their_own_file(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[1, 2, 3, 4]], rejected=[0])
    compute(world, ledger)
    export(ledger, tmp_path / "good", errors_to=tmp_path / "bad")
    assert [line["custom_id"] for line in lines_of(tmp_path / "good")] == ["id-1", "id-2", "id-3"]
    assert [line["custom_id"] for line in lines_of(tmp_path / "bad")] == [None, "id-4"]


@pytest.mark.parametrize("other", ["out", "./scratch/../out", "link/out"])
def test_given_one_file_for_both_when_exported_then_it_is_refused_and_the_old_one_stays(
    world: World, tmp_path: Path, other: str
) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[1, 2, 3, 4]], rejected=[0])
    compute(world, ledger)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "out").write_text("old")
    with pytest.raises(StoreError, match=r"out: is where the rows that succeeded go too; name another file"):
        export(ledger, tmp_path / "out", errors_to=tmp_path / other)
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out", "scratch"]


def test_an_unfinished_job_exports_what_stands(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[0], [1], [2]])
    compute(world, ledger, most=2)
    assert export(ledger, tmp_path / "out").succeeded == 2


def test_a_failed_export_leaves_the_old_file(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[0]])
    compute(world, ledger)
    (tmp_path / "out").write_text("old")
    with pytest.raises(StoreError, match="can't export"):
        export(ledger, tmp_path / "out", errors_to=tmp_path / "missing" / "bad")
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "scratch"]


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(world: World, tmp_path: Path) -> None:
    ledger = JobLedger(world.store)
    plan_by_hand(ledger, world, [[0]])
    nowhere, folder = tmp_path / "missing" / "x.jsonl", tmp_path / "scratch"
    with pytest.raises(StoreError) as caught:
        export(ledger, nowhere)
    assert str(caught.value) == f"{nowhere}: can't export: there is no folder {nowhere.parent}; make it first"
    with pytest.raises(StoreError, match="scratch: can't export: it is a folder; name a file"):
        export(ledger, folder)


def test_a_root_lists_its_jobs_the_newest_first_and_survives_a_bad_one(world: World) -> None:
    ids = []
    for index in range(3):
        world.clock.sleep(60.0)
        ledger = JobLedger(world.store, f"jobs/{9 - index}/")
        ids.append(plan_by_hand(ledger, world, [[0], [1]]).id)
        compute(world, ledger, most=index)
    world.store.create("jobs/5/job.json", b"{broken")
    listed = list(list_jobs(world.store))
    assert [summary.id for summary in listed] == ["5", ids[2], ids[1], ids[0]]
    assert listed[0].problem is not None
    assert "5/job.json: is not JSON" in listed[0].problem
    assert [summary.status for summary in listed[1:]] == [
        JobStatus.FINALIZING, JobStatus.IN_PROGRESS, JobStatus.IN_PROGRESS,
    ]  # fmt: skip
    exact = summarize_job(find_ledger(world.store, "8"))
    assert exact.counts is not None
    assert (exact.counts.succeeded, exact.counts.pending, exact.shards_done, exact.shards_total) == (1, 1, 1, 2)
    with pytest.raises(JobNotFound, match="several jobs"):
        find_ledger(world.store)
    with pytest.raises(JobNotFound, match="no job 77"):
        find_ledger(world.store, "77")


def test_an_output_folder_is_its_job_and_looking_writes_nothing(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with FolderStore(out) as store:
        own = World(store, world.clock, world.random, store.scratch)
        job = plan_by_hand(JobLedger(store), own, [[0, 1]])
        compute(own, JobLedger(store))
    before = sorted(path for path in out.rglob("*"))
    looking = FolderStore(out, read_only=True)
    (summary,) = list_jobs(looking)
    assert (summary.id, summary.status, summary.shards_done) == (job.id, JobStatus.COMPLETED, 1)
    assert summary.location.rstrip("/") == str(out)
    assert find_ledger(looking, job.id).job() == job
    assert sorted(path for path in out.rglob("*")) == before


def test_an_empty_root_has_no_jobs(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, read_only=True)
    assert list(list_jobs(store)) == []
    with pytest.raises(JobNotFound, match="holds no job"):
        find_ledger(store)
