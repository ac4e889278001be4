"""What `tokenmill experiment` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill import output

if TYPE_CHECKING:
    from datetime import datetime

    from pipeline.experiments.comparison import ExperimentComparison
    from pipeline.experiments.registry import ExperimentState
    from schemas.experiments import Experiment
    from schemas.releases import Bounds


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
    """An experiment, its arms and its end."""
    experiment, outcome = state.experiment, state.outcome
    length = f"slices of {output.duration(experiment.slice_seconds)} from {experiment.started_at:%Y-%m-%d %H:%M:%S} UTC"
    ended = "open" if outcome is None else f"ended by {outcome.by} at {outcome.at:%Y-%m-%d %H:%M:%S} UTC"
    lines = [f"experiment {experiment.number}, {experiment.name}: {ended}; by {experiment.assignment}, {length}"]
    arm = present_arm(state, now)
    for one in experiment.arms:
        weights = ", ".join(f"{term} {weight:g}" for term, weight in one.weights)
        lines.append(f"  {one.name}: {weights}{'  <- now' if one.name == arm else ''}")
    return lines + [f"  {reason}" for reason in (() if outcome is None else outcome.reasons)]


def show(experiment: Experiment, compared: ExperimentComparison) -> None:
    """Print means, differences and verdicts."""
    from pipeline.experiments.comparison import MEASURES

    columns = ("arm", "slices", "machines", *(name.replace("_", " ") for name in MEASURES))
    rows: list[tuple[object, ...]] = [
        (arm.name, arm.slices, arm.machines, *(_mean(arm.means[name]) for name in MEASURES)) for arm in compared.arms
    ]
    for one in compared.comparisons:
        differences = (_interval(one.differences.get(name)) for name in MEASURES)
        rows.append((f"{one.arm} - {experiment.arms[0].name}", None, None, *differences))
    output.stdout().print(output.table(None, columns, rows, right=columns[1:]))
    of = "blocks" if experiment.assignment == "time" else "slices"
    print(f"{compared.samples} {of} of {experiment.max_blocks}, tested first at {experiment.min_blocks}")
    for one in compared.comparisons:
        print(one.reason)


def _mean(found: Bounds | None) -> str:
    return "-" if found is None else f"{found.mean:.4g} ± {(found.high - found.low) / 2:.2g}"


def _interval(found: Bounds | None) -> str:
    return "-" if found is None else f"{found.mean:+.4g} ({found.low:+.3g} to {found.high:+.3g})"
