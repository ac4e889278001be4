"""A run that is killed while its planner plans: no other run gets the folder before both processes are gone.

The planner is frozen, as it would be in a long write, so that it can't end with its parent, as it otherwise does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JobLedger, LedgerError
from pipeline.ports import OutputLocked
from schemas.jobs.job import JobSettings
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from schemas.requests.limits import PlanSettings
from tokenmill.local.embedded import open_output

Chat = Callable[..., dict[str, Any]]
Write = Callable[..., Path]

SETTINGS = JobSettings(plan=PlanSettings(first_segment_rows=4, segment_rows=4))
RUN = """
import sys, time
from pathlib import Path
from tests.tokenmill.processes.test_orphaned_planner import begin
from tokenmill.local.embedded import open_output
from tokenmill.processes.planner_process import PlannerProcess
source, out = Path(sys.argv[1]), Path(sys.argv[2])
with open_output(out) as output:
    job = begin(output, source)
    with PlannerProcess(out, output.lock, output.ledger, job.input, lambda segment: None, lambda: None) as planner:
        print(planner.pid, flush=True)
        time.sleep(600)
"""


def begin(output: Any, source: Path, *, fresh: bool = False) -> Any:
    """A job of which the first segment is planned."""
    pin = ModelPin(name="tiny", source="tiny", dtype="float32")
    order = JobOrder(input=pin_input(source), models=(pin,), settings=SETTINGS)
    job = submit(order, output.ledger, output.world, fresh=fresh).job
    plan_job(output.ledger, job, output.world, max_segments=1)
    return job


@dataclass(frozen=True, slots=True)
class Orphan:
    """A planner that can't move, of a run that was killed."""

    pid: int
    parent: int

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def orphan(folder: Path, chat: Chat, write_lines: Write) -> Iterator[Orphan]:
    source = write_lines(*(chat(f"id-{row}") for row in range(400)))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, source, folder / "out"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    planner = int(run.stdout.readline())
    os.kill(planner, signal.SIGSTOP)
    run.kill()
    os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and as a zombie it keeps its id
    try:
        yield Orphan(planner, run.pid)
    finally:
        run.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(planner, signal.SIGKILL)


@pytest.mark.slow
def test_given_a_planner_that_outlives_its_run_when_run_again_then_it_is_waited_for_and_then_refused_with_the_reason(
    folder: Path, orphan: Orphan
) -> None:
    with (
        pytest.raises(OutputLocked, match=rf"a run that was killed \(pid {orphan.parent} on .*still ending; wait a"),
        RunLock(folder / "out", retry_timeout_seconds=0.5),
    ):
        pytest.fail("the planner may still write")

    began = time.monotonic()
    threading.Timer(0.3, orphan.thaw).start()
    with open_output(folder / "out"):
        assert time.monotonic() - began >= 0.3, "it got in alongside a planner that was frozen"
        stands = sorted((folder / "out" / "plan").iterdir())
        time.sleep(0.1)
        assert sorted((folder / "out" / "plan").iterdir()) == stands, "a planner still writes"


@pytest.mark.slow
def test_given_a_planner_that_outlives_its_run_when_started_anew_then_the_plan_is_of_the_new_input_only(
    folder: Path, orphan: Orphan, chat: Chat, write_lines: Write
) -> None:
    other = write_lines(*(chat(f"other-{row}") for row in range(10)), name="other.jsonl")
    threading.Timer(0.2, orphan.thaw).start()

    with open_output(folder / "out") as output:
        job = begin(output, other, fresh=True)
        time.sleep(0.2)
        plan_job(output.ledger, job, output.world)
        segments = list(output.ledger.segments())

    assert {segment.job for segment in segments} == {job.id}
    assert [(segment.first_row, segment.end_row) for segment in segments] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.slow
def test_given_a_run_that_lives_when_run_again_then_it_is_refused_soon(folder: Path) -> None:
    with RunLock(folder), pytest.raises(OutputLocked, match=rf"another run \(pid {os.getpid()} on "), RunLock(folder):
        pytest.fail("both got in")


@pytest.mark.parametrize("index", [0, 1])
def test_given_a_segment_of_another_job_when_the_plan_is_read_then_it_is_refused(
    folder: Path, chat: Chat, write_lines: Write, index: int
) -> None:
    """A segment as an orphaned planner leaves it: of the same rows, under the same name."""
    segments: dict[str, PlanSegment] = {}
    for name in ("old", "new"):
        source = write_lines(*(chat(f"{name}-{row}") for row in range(10)), name=f"{name}.jsonl")
        with open_output(folder / name) as output:
            job = begin(output, source)
            if name == "old":
                plan_job(output.ledger, job, output.world)
                segment = output.ledger.segment(index)
                assert segment is not None
                segments[name] = segment
    ledger = JobLedger(FolderStore(folder / "new", read_only=True))
    (folder / "new" / "plan" / f"{index:05d}.json").write_bytes(segments["old"].to_json())

    with open_output(folder / "new") as output, pytest.raises(LedgerError, match=rf"plan/0000{index}.json.*--fresh"):
        plan_job(output.ledger, job, output.world)
    if index:
        with pytest.raises(LedgerError, match=r"plan/00001.json: begins job .* at row 4, but job .* goes on at row 4"):
            list(ledger.segments())
