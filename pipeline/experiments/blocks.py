"""Closing the blocks of an experiment: the reports of a block's slices are summed once, and the sums are stored.

Interim tests compare closed blocks only, in order. A report that is stored after its block was closed, by a worker that
was cut off from the store, is in no sum: so it changes no test that was made, and all later tests see the same blocks.
A comparison reads one object a block, however many workers there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from pipeline.experiments.registry import ExperimentRegistry
from schemas.experiments import ClosedBlock, Experiment, MachineCounts, SliceCounts, SliceReport

REPORT_SECONDS: Final = 60.0
"""Time for the reports of a block to be stored, from its end until it is closed."""


def due_blocks(experiment: Experiment, now: datetime) -> int:
    """How many blocks, from the first one on, are to be closed by now."""
    seconds = (now - experiment.started_at).total_seconds() - REPORT_SECONDS
    return min(experiment.max_blocks, max(0, int(seconds // experiment.block_seconds)))


def close_block(registry: ExperimentRegistry, experiment: Experiment, block: int) -> ClosedBlock:
    """Sum the reports of the block so far, and store the sums; returns those that count, which are others if they were
    stored first."""
    first = block * experiment.block_slices
    reports = registry.reports(experiment, range(first, first + experiment.block_slices))
    return registry.close(experiment, sum_reports(block, reports))


def sum_reports(block: int, reports: Iterable[SliceReport | None]) -> ClosedBlock:
    """The sums of the block's reports; None stands for one that is unusable."""
    sums: defaultdict[tuple[str, str], SliceCounts] = defaultdict(SliceCounts)
    summed = unusable = 0
    for report in reports:
        if report is None:
            unusable += 1
        else:
            summed += 1
            sums[report.arm, report.unit] += report.counts
    machines = (MachineCounts(arm=arm, machine=machine, counts=one) for (arm, machine), one in sorted(sums.items()))
    return ClosedBlock(block=block, reports=summed, unusable=unusable, machines=tuple(machines))
