"""`tokenmill jobs list --active`: in a root of jobs, and in a folder of output folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.ledger.active_index import mark
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from tests.pipeline.made_jobs import plan_by_hand

Cli = Callable[..., Any]


def make(folder: Path, prefix: str, *, ended: bool) -> str:
    """A job that waits for a worker; or one of refused rows, which ends as soon as it is dispatched. Its id."""
    with FolderStore(folder) as store:
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store, prefix)
        job = plan_by_hand(ledger, world, [] if ended else [[0]], rejected=[1, 2])
        if ended:
            dispatcher = Dispatcher(world, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0))
            dispatcher.add(ledger)
            dispatcher.tick()
            assert dispatcher.finished()
        return job.id


@pytest.mark.parametrize("shape", ["a root", "a folder of output folders"])
@pytest.mark.slow
def test_given_jobs_when_active_ones_are_listed_then_those_that_have_ended_are_left_out(
    tokenmill: Cli, tmp_path: Path, shape: str
) -> None:
    def add(name: str, *, ended: bool) -> str:
        if shape == "a root":
            return make(tmp_path, f"jobs/{name}/", ended=ended)
        return make(tmp_path / name, "", ended=ended)

    add("done", ended=True)
    none = tokenmill("jobs", "list", tmp_path, "--active")
    assert none.code == 0
    assert "no open jobs in " in none.err

    opened = {add(name, ended=False) for name in ("one", "two")}
    listed = tokenmill("jobs", "list", tmp_path, "--active", "--json").json()
    assert {job["id"] for job in listed} == opened
    assert {job["status"] for job in listed} == {"in_progress"}
    assert len(tokenmill("jobs", "list", tmp_path, "--json").json()) == 3
    table = tokenmill("jobs", "list", tmp_path, "--active").out
    assert table.count("in_progress") == 2
    assert "completed" not in table


def test_given_a_root_when_active_jobs_are_listed_then_their_markers_lead_there(tokenmill: Cli, tmp_path: Path) -> None:
    # Given an open job that was made by an old version, without a marker, one that has it, and a marker of no job
    made = make(tmp_path, "jobs/marked/", ended=False)
    unmarked = make(tmp_path, "jobs/unmarked/", ended=False)
    (tmp_path / "active" / "unmarked").unlink()
    with FolderStore(tmp_path) as store:
        mark(JobLedger(store, "jobs/gone/"))
    assert [job["id"] for job in tokenmill("jobs", "list", tmp_path, "--active", "--json").json()] == [made]
    assert {job["id"] for job in tokenmill("jobs", "list", tmp_path, "--json").json()} == {made, unmarked}
