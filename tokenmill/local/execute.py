"""Execution of a planned job in a terminal: progress on stderr, Ctrl-C, and the summary at the end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from tokenmill import output
from tokenmill.errors import Interrupted, KeyboardInterruption, UserError

if TYPE_CHECKING:
    from schemas.jobs.outcome import Manifest
    from tokenmill.local.cascade import CascadePlan
    from tokenmill.local.run_job import JobRun, Load
    from tokenmill.local.run_plan import RunPlan
    from tokenmill.local.tracker import RunTracker

SHOWN_ERRORS: Final = 10
CLOSED: Final = {"cancelled": "was cancelled", "expired": "has expired"}


def execute(plan: RunPlan, *, as_json: bool) -> None:
    """Run the job and print its outcome. Raises what `run_job` raises, and `Interrupted`."""
    _report(run_with_progress(plan), plan, as_json=as_json)


def execute_cascade(plan: CascadePlan, *, as_json: bool) -> None:
    """Run a cascade and print its outcome. Raises as `execute`."""
    from tokenmill.local.cascade import FOLDER, MERGED, run_cascade
    from tokenmill.local.summary import show_cascade

    def run(step: RunPlan) -> Manifest | None:
        output.say(f"{step.output}: {', '.join(model.name for model in step.models)} answers")
        return run_with_progress(step).manifest

    end = run_cascade(plan, run)
    if end.stopped_at is not None:
        step, manifest = end.stopped_at
        if manifest is None:
            raise Interrupted(f"interrupted in {step.output}; the same command goes on from there")
        raise UserError(f"{step.output}: this step {manifest.status.value}, so the cascade ends there")
    assert end.outcome is not None, "a cascade that didn't stop has an outcome"
    if as_json:
        output.print_json({"output": str(plan.first.output), **end.outcome.model_dump(mode="json")})
    show_cascade(end.outcome, plan.first.output / FOLDER / MERGED)


def run_with_progress(plan: RunPlan, load: Load | None = None) -> JobRun:
    """Run with progress on stderr; the first Ctrl-C stops after the current step, the second at once. Raises what
    `run_job` raises, and `UserError` for an invalid input.

    Args:
        load: as of `run_job`; None: a model for this job.
    """
    from pipeline.planner import InvalidInput
    from tokenmill.local.run_job import run_job
    from tokenmill.local.run_plan import load_model

    try:
        with shown(plan.price_per_hour) as (tracker, stop):
            return run_job(plan, tracker, stop, load or load_model)
    except InvalidInput as error:
        for wrong in error.errors[:SHOWN_ERRORS]:
            output.say(f"line {wrong.line}: {wrong.code}: {wrong.message}")
        if error.count > SHOWN_ERRORS:
            output.say(f"… and {error.count - SHOWN_ERRORS} more")
        raise UserError(f"{error}; nothing was computed. Correct the lines, or run with --on-invalid row") from error


@contextmanager
def shown(price_per_hour: float | None) -> Iterator[tuple[RunTracker, threading.Event]]:
    """Show progress on stderr, and handle signals: the event is set when the run is to stop."""
    from tokenmill.local.progress import ProgressDisplay
    from tokenmill.local.tracker import RunTracker
    from tokenmill.processes.logging import log_to_stderr

    log_to_stderr()
    tracker, stop = RunTracker(price_per_hour), threading.Event()
    with _stopping(stop, tracker), ProgressDisplay(output.stderr(), tracker.snapshot):
        yield tracker, stop


@contextmanager
def _stopping(stop: threading.Event, tracker: RunTracker) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM: while the engine computes, the first one stops it after the current step, so that
    finished rows are committed. At any other time, and at the second signal, everything ends at once: that is safe too,
    but more work is repeated. Only a main thread can handle signals; on others they stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set() or not tracker.is_computing:
            raise KeyboardInterruption
        stop.set()
        output.say("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(done: JobRun, plan: RunPlan, *, as_json: bool) -> None:
    """Print the outcome: summary on stderr, the document on stdout with --json. Raises `Interrupted` without one."""
    from tokenmill.local import summary

    manifest = done.manifest
    if manifest is None:
        raise Interrupted(f"interrupted: {done.progress} in {plan.output}; the same command goes on from there")
    closed = _at_limit(manifest, plan) if manifest.ended_by == "spend" else CLOSED.get(manifest.status)
    if closed is not None:
        again = f"'tokenmill jobs retry {plan.output} --output NEW' answers the other rows"
        output.say(f"{plan.output}: this job {closed}; what was finished is kept, and {again}")
    elif done.before and done.before == done.counts.total:
        output.say(f"{plan.output}: this job was done before; --fresh runs it anew")
    elif done.before:
        output.say(f"{output.count(done.before)} rows had a result from an earlier run")
    if closed is None and plan.max_cost is not None and manifest.cost is not None and manifest.cost > plan.max_cost:
        output.say(
            f"{plan.output}: this job cost {manifest.cost:.4g}, more than its limit of {plan.max_cost:g}: "
            "all of it was under way before that was known"
        )
    if as_json:
        output.print_json(summary.as_document(manifest, plan.output))
    summary.show(manifest, plan.output, plan.max_cost)


def _at_limit(manifest: Manifest, plan: RunPlan) -> str:
    """The message of a job's end at its spending limit; its cost may be higher by the shards in flight."""
    limit = "its spending limit" if plan.max_cost is None else f"its spending limit of {plan.max_cost:g}"
    if manifest.cost is None:
        return f"has reached {limit}"
    beyond = plan.max_cost is not None and manifest.cost > plan.max_cost
    why = ": what was under way at the limit is paid for, too" if beyond else ""
    return f"has reached {limit} and cost {manifest.cost:.4g}{why}"
