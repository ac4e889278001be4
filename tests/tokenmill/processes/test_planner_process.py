"""Most of a job is planned while it is computed, by a process that may fail, be killed, or outlive its parent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JobLedger, part_key
from pipeline.ports import PipelineError
from schemas.jobs.job import Job, JobSettings, Tier
from schemas.jobs.outcome import Counts
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from schemas.requests.limits import PlanSettings
from tests.waiting import HANG_SECONDS
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel, known_input
from tokenmill.local.embedded import Output, open_output
from tokenmill.local.run_job import JobRun, run_job
from tokenmill.local.run_plan import RunPlan, load_model
from tokenmill.local.tracker import RunTracker
from tokenmill.models import sources
from tokenmill.processes.planner_process import PlannerProcess
from workers.model.loaded_model import LoadedModel

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
Chat = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]

ROWS = 40
SETTINGS = JobSettings(plan=PlanSettings(first_segment_rows=4, segment_rows=8))


@pytest.fixture
def source(chat: Chat, write_lines: Write) -> Path:
    return write_lines(*("{" if row % 10 == 5 else chat(f"id-{row}", text=f"word {row}") for row in range(ROWS)))


class HookedTracker(RunTracker):
    """A tracker that calls a function when computing begins, just before the rest is planned."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self._do = do

    def set_plan(self, counts: Counts, *, whole: bool = True) -> None:
        super().set_plan(counts, whole=whole)
        self._do()


def run(source: Path, folder: Path, model_folder: Path, before_planning: Callable[[], object]) -> JobRun:
    plan = RunPlan(
        inputs=pin_input(source),
        models=(ChosenModel("tiny", sources.ModelSource("tiny", model_folder, None, 0)),),
        output=folder / "out",
        tier=Tier.STANDARD,
        settings=SETTINGS,
        engine=EngineOptions(dtype="float32", threads=1),
    )

    def load(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
        assert [segment.index for segment in segments] == [0], "no more was waited for"
        return load_model(plan, pin, segments)

    return run_job(plan, HookedTracker(before_planning), threading.Event(), load)


def test_a_job_of_many_segments_is_planned_while_it_is_computed(
    folder: Path, model_folder: Path, source: Path, results: Results
) -> None:
    done = run(source, folder, model_folder, lambda: None)
    assert done.manifest is not None
    assert (done.counts.total, done.counts.failed) == (ROWS, 4)
    assert sorted(row["row"] for row in results(folder / "out")) == list(range(ROWS))
    assert len(list((folder / "out" / "plan").iterdir())) == 6


@pytest.mark.exhaustive
def test_given_an_input_that_vanishes_while_it_is_planned_then_the_run_fails_with_a_message_and_can_go_on(
    folder: Path, model_folder: Path, source: Path, results: Results
) -> None:
    out, aside = folder / "out", source.with_name("aside.jsonl")
    with pytest.raises(PipelineError, match=r"requests.jsonl: can't read the input: No such file"):
        run(source, folder, model_folder, lambda: source.rename(aside))
    assert (out / part_key(0)).is_file()
    assert not (out / "manifest.json").exists()
    aside.rename(source)
    assert run(source, folder, model_folder, lambda: None).counts.total == ROWS
    assert sorted(row["row"] for row in results(out)) == list(range(ROWS))


@contextmanager
def started_job_in(out: Path, source: Path) -> Iterator[tuple[Output, Job]]:
    """A job of which the first segment is planned."""
    with open_output(out) as output:
        pin = ModelPin(name="tiny", source="tiny", dtype="float32")
        order = JobOrder(input=pin_input(source), models=(pin,), settings=SETTINGS)
        job = submit(order, output.ledger, output.world).job
        plan_job(output.ledger, job, output.world, max_segments=1)
        yield output, job


@pytest.fixture
def started_job(folder: Path, source: Path) -> Iterator[tuple[Output, Job]]:
    """A job of which the first segment is planned, with its lock held."""
    with started_job_in(folder / "out", source) as started_job:
        yield started_job


def test_the_planner_reports_each_segment_once(started_job: tuple[Output, Job], folder: Path) -> None:
    output, job = started_job
    reported: list[PlanSegment] = []
    ended = threading.Event()

    def report(segment: PlanSegment) -> None:
        reported.append(segment)
        if segment.last:
            ended.set()

    with PlannerProcess(folder / "out", output.lock, output.ledger, job.input, report, ended.set) as planner:
        assert ended.wait(HANG_SECONDS)
        planner.check()
    assert reported == list(output.ledger.segments(1))
    assert reported[-1].end_row == ROWS


def test_given_a_changed_input_when_it_is_planned_then_the_planner_fails_once_with_a_remedy(
    started_job: tuple[Output, Job], folder: Path, source: Path
) -> None:
    output, job = started_job
    source.write_text(source.read_text() + "more\n")
    failed = threading.Event()
    with PlannerProcess(
        folder / "out", output.lock, output.ledger, job.input, lambda segment: None, failed.set
    ) as planner:
        assert failed.wait(HANG_SECONDS)
        with pytest.raises(PipelineError, match="when the job was accepted; put the old file back"):
            planner.check()
    assert len(list(output.ledger.segments())) == 1


def test_given_an_input_rewritten_at_the_same_size_when_it_is_planned_then_the_planner_fails_with_a_remedy(
    started_job: tuple[Output, Job], folder: Path, source: Path
) -> None:
    output, job = started_job
    time.sleep(0.02)  # a later tick of the file system's clock
    source.write_text(source.read_text().replace("word", "lord"))
    failed = threading.Event()
    with PlannerProcess(
        folder / "out", output.lock, output.ledger, job.input, lambda segment: None, failed.set
    ) as planner:
        assert failed.wait(HANG_SECONDS)
        with pytest.raises(
            PipelineError, match=rf"^{source}: was written or replaced .*; put the old file back and run again"
        ):
            planner.check()
    assert len(list(output.ledger.segments())) == 1


def test_given_a_changed_input_when_the_job_is_cancelled_then_it_is_ended_only_with_the_lines_that_it_was_accepted_with(
    tokenmill: Cli, folder: Path, source: Path, results: Results
) -> None:
    out, text = folder / "out", source.read_text()
    with started_job_in(out, source):
        pass
    time.sleep(0.02)
    source.write_text(text.replace("id-", "ID-"))

    for _ in range(2):
        refused = tokenmill("jobs", "cancel", out)
        assert refused.code == 1
        assert refused.error.startswith(
            f"error: {source}: is not what the job was accepted with; put the old file back"
        )
        assert len(list((out / "plan").iterdir())) == 1
    source.write_text(text)
    ended = tokenmill("jobs", "cancel", out)

    assert ended.code == 0, ended.err
    ids = [None if row % 10 == 5 else f"id-{row}" for row in range(ROWS)]
    assert [row["custom_id"] for row in results(out)] == ids
    for file in (source, out / "manifest.json"):
        file.unlink()
    again = tokenmill("jobs", "cancel", out)
    assert again.code == 0, f"what is planned whole needs no input: {again.err}"


def test_given_a_planner_that_is_stopped_then_it_is_gone_with_all_it_was_building(
    started_job: tuple[Output, Job], folder: Path
) -> None:
    output, job = started_job
    private = folder / "out" / ".tmp"
    own = set(private.iterdir())
    with PlannerProcess(
        folder / "out", output.lock, output.ledger, job.input, lambda segment: None, lambda: None
    ) as planner:
        pid = planner.pid
    assert not Path(f"/proc/{pid}").exists()
    assert set(private.iterdir()) == own
    plan_job(output.ledger, job, output.world)
    assert JobLedger(output.world.store).planned_parts() is not None


def test_the_same_input_is_not_read_again_once_the_plan_is_whole(
    folder: Path, model_folder: Path, source: Path
) -> None:
    assert known_input(folder / "out") is None
    with open_output(folder / "out") as output:
        pin = ModelPin(name="tiny", source="tiny", dtype="float32")
        job = submit(
            JobOrder(input=pin_input(source), models=(pin,), settings=SETTINGS), output.ledger, output.world
        ).job
        plan_job(output.ledger, job, output.world, max_segments=1)
        assert known_input(folder / "out") is None, "it is read again anyway"
        plan_job(output.ledger, job, output.world)
    known = known_input(folder / "out")
    assert known == job.input
