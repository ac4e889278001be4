"""Which arm of an experiment a worker has, and when: pure functions of the experiment's record, so workers need not
agree on anything but the time of day.

By time, each block has one slice of each arm, in an order that is drawn by a hash. If all arms are equal, swapping two
arms' slices of a block changes nothing, whatever the load does: the difference within a block is as probable with one
sign as with the other, and independent of other blocks' signs. A load that is correlated in time, or repeats itself
with the slices, therefore makes no difference where there is none. (Bojinov, Simchi-Levi and Zhao 2023, "Design and
analysis of switchback experiments", have more on such designs.) What the design assumes is that a slice's arm acts on
nothing that is measured in a later one; `Experiment.carry_over` is for that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta

from schemas.experiments import Experiment, ExperimentArm


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of an experiment, as one worker has it.

    Attributes:
        number: from 0.
        starts_at, measured_at, ends_at: the counts between the last two are reported.
    """

    experiment: Experiment
    number: int
    arm: ExperimentArm
    starts_at: datetime
    measured_at: datetime
    ends_at: datetime


def slice_at(experiment: Experiment, machine: str, now: datetime) -> Slice | None:
    """The slice of this machine's workers at this time; None: the experiment has not begun, or its last slice has
    ended."""
    number = int((now - experiment.started_at).total_seconds() // experiment.slice_seconds)
    if not 0 <= number < experiment.num_slices:
        return None
    start = experiment.started_at + timedelta(seconds=number * experiment.slice_seconds)
    return Slice(
        experiment,
        number,
        arm_of(experiment, machine, number),
        start,
        start + timedelta(seconds=experiment.slice_seconds * experiment.carry_over),
        start + timedelta(seconds=experiment.slice_seconds),
    )


def arm_of(experiment: Experiment, machine: str, number: int) -> ExperimentArm:
    """The arm of this machine's workers in the slice with this number (`SliceReport.machine`)."""
    if experiment.assignment == "worker":
        return experiment.arms[_hash(experiment, "worker", machine) % len(experiment.arms)]
    block, position = divmod(number, experiment.block_slices)
    order = sorted(range(len(experiment.arms)), key=lambda arm: _hash(experiment, "block", f"{block}:{arm}"))
    return experiment.arms[order[position]]


def _hash(experiment: Experiment, kind: str, what: str) -> int:
    """A number that differs between experiments, also between those of one name."""
    started_at = experiment.started_at.isoformat()
    data = f"{kind}\0{experiment.name}\0{experiment.number}\0{started_at}\0{what}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
