"""Reports of slices under a load that is correlated in time, repeats itself, and differs between workers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.experiments.assignment import arm_of
from pipeline.experiments.blocks import due_blocks, sum_reports
from pipeline.experiments.comparison import ExperimentComparison, compare_arms
from pipeline.experiments.registry import ExperimentRegistry
from schemas.experiments import ArmWeights, Experiment, ExperimentArm, SliceCounts, SliceReport

START = datetime(2026, 3, 1, tzinfo=UTC)


def make_experiment(*arms: str, **more: Any) -> Experiment:
    weights = {name: ArmWeights(utilisation=0.3 + at) for at, name in enumerate(arms or ("own", "more"))}
    given = tuple(ExperimentArm(name=name, weights=one) for name, one in weights.items())
    return Experiment(**{"number": 1, "name": "e", "arms": given, "started_at": START, "max_blocks": 64} | more)


def simulate_reports(
    experiment: Experiment,
    seed: int,
    effects: Mapping[str, float] | None = None,
    workers: Sequence[str] = ("w0",),
    slices: int | None = None,
    period: int = 2,
) -> list[SliceReport]:
    """Reports of all slices.

    Args:
        effects: arm -> factor of its late tokens.
        slices: number of them; None: all.
        period: the load repeats itself after so many slices, beside a part that is correlated with 0.95 from one slice
            to the next.
    """
    draw = random.Random(seed)
    reports, load = [], draw.gauss(0, 0.5)
    own = {worker: draw.gauss(0, 0.2) for worker in workers}
    for number in range(experiment.num_slices if slices is None else slices):
        load = 0.95 * load + draw.gauss(0, 0.5 * math.sqrt(1 - 0.95**2))
        wave = 0.5 * math.cos(2 * math.pi * number / period)
        for worker in workers:
            own[worker] = 0.99 * own[worker] + draw.gauss(0, 0.02)
            arm = arm_of(experiment, worker, number).name
            share = 0.03 * math.exp(load + wave + own[worker] + draw.gauss(0, 0.1)) * (effects or {}).get(arm, 1.0)
            late = round(min(1.0, share) * 10_000)
            counts = SliceCounts(
                first_tokens=100, late_first_tokens=late // 200, later_tokens=10_000, late_tokens=late, steps=1_000,
                throttled_steps=900, tokens=50_000 - late, seconds=experiment.slice_seconds * 0.8,
            )  # fmt: skip
            reports.append(SliceReport(slice=number, arm=arm, worker=worker, model="m", counts=counts))
    return reports


def after(experiment: Experiment) -> datetime:
    """A time at which all blocks are closed."""
    return experiment.ends_at + timedelta(hours=1)


def compare_reports(
    experiment: Experiment, reports: Iterable[SliceReport], now: datetime | None = None
) -> ExperimentComparison:
    """Compare the arms by the reports of all blocks that are closed by now."""
    by_block: dict[int, list[SliceReport]] = {}
    for report in reports:
        by_block.setdefault(report.slice // experiment.block_slices, []).append(report)
    blocks = range(due_blocks(experiment, now or after(experiment)))
    return compare_arms(experiment, (sum_reports(block, by_block.get(block, [])) for block in blocks))


def stored_reports(registry: ExperimentRegistry, experiment: Experiment) -> list[SliceReport]:
    """All reports that can be used."""
    found = registry.reports(experiment, range(experiment.num_slices))
    return [report for report in found if report is not None]
