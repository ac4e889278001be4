"""Records of experiments with the scheduler's weights: the order, its end, what a worker measured in a slice, and the
sums of a block. All are written once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from schemas.stored import Count, StoredModel, StoredReport

MAX_ARMS = 4
MAX_WORKER_NAME = 200

ExperimentName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
"""Of an experiment, or an arm: a label of metrics."""

Weight = Annotated[float, Field(ge=0, le=1_000)]
"""Bounded, because a limit of the controller changes by its exponential."""


class ArmWeights(StoredModel):
    """The weights w1 to w4 of the objective that the SLO controller minimizes."""

    ttft: Weight = 1.0
    itl: Weight = 1.0
    utilisation: Weight = 0.3
    drops: Weight = 1.0


class ExperimentArm(StoredModel):
    """A set of weights under a name."""

    name: ExperimentName
    weights: ArmWeights


class Experiment(StoredModel):
    """`experiments/NNNNN/experiment.json`: workers compute with these arms' weights, by turns.

    Attributes:
        number: of the root's experiment, from 1.
        arms: the first one is the control that the others are compared with.
        assignment: "time": all workers have one arm in a slice, in a random order within each block of as many slices
            as there are arms. "worker": a worker has one arm throughout, by a hash of its machine.
        slice_seconds: length of a slice; the first one begins at `started_at`.
        carry_over: share of a slice, at its start, that is not measured: requests and limits of the slice before are
            still at work.
        objective: the weights by which all arms are judged.
        alpha: probability that any arm is found better or worse although all are equal, over all interim tests.
        min_blocks, max_blocks: samples of the first and of the last interim test: blocks of slices, or slices. The
            experiment ends after the last one.
        model: only workers of this model take part; None: all.
    """

    version: Literal[1] = 1
    number: Annotated[int, Field(ge=1, le=99_999)]
    name: ExperimentName
    arms: Annotated[tuple[ExperimentArm, ...], Field(min_length=2, max_length=MAX_ARMS)]
    assignment: Literal["time", "worker"] = "time"
    slice_seconds: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    carry_over: Annotated[float, Field(ge=0, le=0.9)] = 0.2
    objective: ArmWeights = ArmWeights()
    alpha: Annotated[float, Field(gt=1e-6, lt=0.5)] = 0.05
    min_blocks: Annotated[int, Field(ge=4, le=10_000)] = 8
    max_blocks: Annotated[int, Field(ge=4, le=10_000)] = 256
    model: str | None = None
    started_at: AwareDatetime

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise ValueError("two arms have one name")
        if self.max_blocks < self.min_blocks:
            raise ValueError("max_blocks is smaller than min_blocks")
        return self

    @property
    def block_slices(self) -> int:
        """Slices of a block."""
        return len(self.arms) if self.assignment == "time" else 1

    @property
    def block_seconds(self) -> float:
        """Length of a block."""
        return self.block_slices * self.slice_seconds

    @property
    def num_slices(self) -> int:
        """Slices of the whole experiment."""
        return self.block_slices * self.max_blocks

    @property
    def ends_at(self) -> datetime:
        """The end of the last slice."""
        return self.started_at + timedelta(seconds=self.num_slices * self.slice_seconds)


class ExperimentOutcome(StoredModel):
    """`experiments/NNNNN/outcome.json`: the end of an experiment; the first one written counts. Workers then have their
    own weights again.

    Attributes:
        by: "comparison": every arm was found better or worse than the control; "time": the last slice has ended.
        reasons: a sentence for each arm.
    """

    version: Literal[1] = 1
    by: Literal["comparison", "time", "operator"]
    reasons: tuple[str, ...] = ()
    at: AwareDatetime


class SliceCounts(StoredReport):
    """What an engine counted, of requests of class 0 unless stated otherwise.

    Attributes:
        first_tokens, late_first_tokens: all, and those that missed the objective.
        later_tokens, late_tokens: times between two tokens of an answer, and those that missed the objective.
        steps, throttled_steps: steps with such requests, and those from which other work was held back.
        drops: requests that timed out.
        tokens: computed for all requests: prompt tokens and sampled ones.
        seconds: duration.
    """

    first_tokens: Count = 0
    late_first_tokens: Count = 0
    later_tokens: Count = 0
    late_tokens: Count = 0
    steps: Count = 0
    throttled_steps: Count = 0
    drops: Count = 0
    tokens: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _parts(self) -> SliceCounts:
        parts = (
            (self.late_first_tokens, self.first_tokens),
            (self.late_tokens, self.later_tokens),
            (self.throttled_steps, self.steps),
        )
        if any(part > whole for part, whole in parts):
            raise ValueError("a part is larger than the whole")
        return self

    def __add__(self, other: SliceCounts) -> SliceCounts:
        return SliceCounts(**{name: getattr(self, name) + getattr(other, name) for name in SliceCounts.model_fields})

    def since(self, before: SliceCounts) -> SliceCounts:
        """The counts after `before`."""
        return SliceCounts(**{name: getattr(self, name) - getattr(before, name) for name in SliceCounts.model_fields})


class SliceReport(StoredReport):
    """`experiments/NNNNN/slices/SSSSSSSS-WORKER.json`: what one worker measured in one slice, behind its carry-over.

    Attributes:
        arm: its name.
        worker: the process's name, which is another one after a restart.
        machine: the worker's GPU or MIG instance by its UUID, or its host if it has none; a restart does not change it.
            "": the version that wrote it had no such field.
    """

    version: Literal[1] = 1
    slice: Count
    arm: ExperimentName
    worker: Annotated[str, Field(min_length=1, max_length=MAX_WORKER_NAME)]
    machine: Annotated[str, Field(max_length=MAX_WORKER_NAME)] = ""
    model: str
    counts: SliceCounts

    @property
    def unit(self) -> str:
        """The unit that has an arm and is a sample, by worker: the machine, so that restarts make no more samples."""
        return self.machine or self.worker


class MachineCounts(StoredReport):
    """What the workers of one machine measured with one arm in a block. `machine`: a `SliceReport.unit`."""

    arm: ExperimentName
    machine: Annotated[str, Field(min_length=1, max_length=MAX_WORKER_NAME)]
    counts: SliceCounts


class ClosedBlock(StoredReport):
    """`experiments/NNNNN/blocks/BBBBBBBB.json`: the sums of those reports of a block that are compared. The first one
    written counts; reports that are stored later are left out.

    Attributes:
        block: its number, from 0.
        reports: number of those in the sums.
        unusable: number of those that were damaged, or did not fit the experiment.
    """

    version: Literal[1] = 1
    block: Count
    reports: Count
    unusable: Count = 0
    machines: tuple[MachineCounts, ...] = ()
