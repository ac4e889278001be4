"""What `tokenmill experiment` prints."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from tokenmill import output

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from pipeline.experiments.comparison import ExperimentComparison
    from pipeline.experiments.registry import ExperimentState
    from schemas.experiments import Experiment
    from schemas.releases import Bounds

LABELS: Final = {
    "objective": "objective (less is better)",
    "late_first_tokens": "late first tokens, share",
    "late_tokens": "late tokens, share",
    "held_back": "steps with work held back, share",
    "drops": "requests that timed out, share",
    "tokens_per_second": "tokens a second of a worker",
}
"""Of the measures."""


def document(state: ExperimentState) -> dict[str, Any]:
    """An experiment as JSON."""
    outcome = state.outcome
    return {
        "experiment": state.experiment.model_dump(mode="json"),
        "outcome": None if outcome is None else outcome.model_dump(mode="json"),
    }


def present_arm(state: ExperimentState, now: datetime) -> str | None:
    """The arm that all workers have now."""
    from pipeline.experiments.assignment import slice_at

    if state.outcome is not None or state.experiment.assignment == "worker":
        return None
    current = slice_at(state.experiment, "", now)
    return None if current is None else current.arm.name


def lines(state: ExperimentState, now: datetime) -> list[str]:
    """An experiment, its end, and its arms."""
    experiment, outcome = state.experiment, state.outcome
    length = f"slices of {output.duration(experiment.slice_seconds)} from {experiment.started_at:%Y-%m-%d %H:%M:%S} UTC"
    ended = (
        f"open until {experiment.ends_at:%Y-%m-%d %H:%M:%S} UTC at the latest"
        if outcome is None
        else f"ended by {outcome.by} at {outcome.at:%Y-%m-%d %H:%M:%S} UTC"
    )
    lines = [f"experiment {experiment.number}, {experiment.name}: {ended}; by {experiment.assignment}, {length}"]
    arm = present_arm(state, now)
    for one in experiment.arms:
        weights = ", ".join(f"{term} {weight:g}" for term, weight in one.weights)
        lines.append(f"  {one.name}: {weights}{'  <- now' if one.name == arm else ''}")
    return lines


def show(experiment: Experiment, compared: ExperimentComparison, notes: Sequence[str] = ()) -> None:
    """Print means and differences, then the notes, then the verdicts."""
    control, none = experiment.arms[0].name, [None] * len(compared.comparisons)
    columns = ["mean of the slices", *(arm.name for arm in compared.arms)]
    columns += [
        f"{one.arm} - {control}, " + (f"first {one.tested} samples" if one.tested else "not tested yet")
        for one in compared.comparisons
    ]
    rows: list[tuple[object, ...]] = []
    for name, label in LABELS.items():
        differences = (_difference(one.differences.get(name)) for one in compared.comparisons)
        rows.append((label, *(_mean(arm.means[name]) for arm in compared.arms), *differences))
    rows.append(("slices", *(arm.slices for arm in compared.arms), *none))
    rows.append(("machines", *(arm.machines for arm in compared.arms), *none))
    output.stdout().print(output.table(None, columns, rows, right=columns[1:]))
    for line in (*notes, *(one.reason for one in compared.comparisons)):
        print(line)


def progress(state: ExperimentState, compared: ExperimentComparison, late: int, now: datetime) -> list[str]:
    """How far the experiment is, what is left out, and why there may be no verdict. `late`: number of reports."""
    from pipeline.experiments.blocks import REPORT_SECONDS, due_blocks
    from pipeline.experiments.comparison import MIN_MACHINES
    from pipeline.experiments.controller import POLL_INTERVAL_SECONDS

    experiment, is_open = state.experiment, state.outcome is None
    tests = f"; the next test is at {compared.next_test} samples" if is_open and compared.next_test else ""
    lines = [
        f"{compared.blocks} of {experiment.max_blocks} blocks are closed; {compared.samples} of them are samples, with "
        f"each arm measured{tests}"
    ]
    behind = due_blocks(experiment, now - timedelta(seconds=2 * POLL_INTERVAL_SECONDS)) - compared.blocks
    if is_open and behind > 0:
        lines.append(f"{behind} more blocks are over and not closed yet: is a dispatcher (or serve) running?")
    elif is_open and not compared.blocks:
        first = experiment.started_at + timedelta(seconds=experiment.block_seconds + REPORT_SECONDS)
        lines.append(f"a dispatcher (or serve) closes the first block after {first:%Y-%m-%d %H:%M:%S} UTC")
    if late or compared.unusable:
        lines.append(
            f"left out: {late} reports that came after their block was closed, {compared.unusable} that are unusable"
        )
    if experiment.assignment == "worker" and min(arm.machines for arm in compared.arms) < MIN_MACHINES:
        lines.append(f"no test is possible by worker: each arm needs {MIN_MACHINES} machines")
    return lines


def _mean(found: Bounds | None) -> str:
    return "-" if found is None else f"{found.mean:.4g}"


def _difference(found: Bounds | None) -> str:
    return "-" if found is None else f"{found.mean:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
