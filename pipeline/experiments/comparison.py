"""The comparison of an experiment's arms: a pure function of the reports of slices.

The objective of a slice is the weighted sum of four shares: of first tokens that were late, of later tokens that were
late, of steps from which other work was held back, and of requests that timed out. (The controller's own terms are
averages that fade over many slices, weighted by each arm's own weights; counts of a slice are neither.) An arm is found
better or worse than the control when the whole interval of the difference in the objective lies on one side of zero at
an interim test (`pipeline.sequential_test`). The samples are

- by time, blocks: the difference between the arm's slice and the control's, all workers' counts summed. They are
  independent in sign by design (`pipeline.experiments.assignment`);
- by worker, the workers' machines, whose workers' counts are summed: a worker that restarts has another name, but the
  same machine, so it is still one sample. A sample is the machine's mean over the slices of its distance to the middle
  between the arms' means in the same slice, so that the load, which all have in common, drops out. Machines must be
  independent of each other given the load; the slices of one machine need not be, because only its mean counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Final, Literal, Protocol

from pipeline.sequential_test import difference_bounds, interim_tests, mean_bounds
from schemas.experiments import Experiment, SliceCounts, SliceReport
from schemas.releases import Bounds

MIN_MACHINES: Final = 3
"""Machines of each arm for a verdict, if machines are the samples."""

REPORT_SECONDS: Final = 60.0
"""Time for reports of a slice to be stored, before its block counts: a repeated test must see the same blocks."""

MEASURES: Final = ("objective", "late_first_tokens", "late_tokens", "held_back", "drops", "tokens_per_second")

Verdict = Literal["better", "worse", "no difference shown", "open"]
Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm over all measured slices.

    Attributes:
        slices, machines: numbers of those with reports.
        means: by measure, of slices; with an interval for slices that were independent of each other.
    """

    name: str
    slices: int
    machines: int
    counts: SliceCounts
    means: Mapping[str, Bounds | None]


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """An arm against the control.

    Attributes:
        verdict: by the objective.
        tested: samples of the last interim test, which is the first one that decided; 0: none was due.
        differences: by measure: the arm less the control, with the interval of that test.
    """

    arm: str
    verdict: Verdict
    tested: int
    differences: Mapping[str, Bounds | None]

    @property
    def reason(self) -> str:
        """The verdict as a sentence."""
        found = self.differences.get("objective")
        words = "" if found is None else f": objective {found.mean:+.4g} ({found.low:+.4g} to {found.high:+.4g})"
        return f"{self.arm}: {self.verdict}{words}, at {self.tested} samples"


@dataclass(frozen=True, slots=True)
class ExperimentComparison:
    """All arms of an experiment. `samples`: blocks, or slices with machines of all arms, that can be compared."""

    samples: int
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[ArmComparison, ...]

    @property
    def is_decided(self) -> bool:
        """Whether each arm has its verdict."""
        return all(one.verdict != "open" for one in self.comparisons)


def measures_of(experiment: Experiment, counts: SliceCounts) -> Measures | None:
    """The measures of these counts; None: no request of class 0 was there. Tokens a second are those of a worker."""
    if not counts.first_tokens + counts.later_tokens + counts.drops:
        return None
    weights = experiment.objective
    shares = {
        "late_first_tokens": counts.late_first_tokens / max(1, counts.first_tokens),
        "late_tokens": counts.late_tokens / max(1, counts.later_tokens),
        "held_back": counts.throttled_steps / max(1, counts.steps),
        "drops": counts.drops / max(1, counts.drops + counts.first_tokens),
    }
    by = (weights.ttft, weights.itl, weights.utilisation, weights.drops)
    objective = sum(weight * share for weight, share in zip(by, shares.values(), strict=True))
    tokens_per_second = counts.tokens / counts.seconds if counts.seconds else 0.0
    return {"objective": objective, **shares, "tokens_per_second": tokens_per_second}


def compare_arms(experiment: Experiment, reports: Iterable[SliceReport], now: datetime) -> ExperimentComparison:
    """Compare the arms by the reports so far."""
    seconds = (now - experiment.started_at - timedelta(seconds=REPORT_SECONDS)).total_seconds()
    blocks = int(seconds // (experiment.slice_seconds * experiment.block_slices))
    closed = [report for report in reports if report.slice < blocks * experiment.block_slices]
    samples = (_Blocks if experiment.assignment == "time" else _Machines)(experiment, closed)
    is_over = blocks >= experiment.max_blocks or samples.count >= experiment.max_blocks
    compared = tuple(_compare(experiment, samples, arm.name, is_over=is_over) for arm in experiment.arms[1:])
    summaries = tuple(_summary(experiment, arm.name, closed) for arm in experiment.arms)
    return ExperimentComparison(samples.count, summaries, compared)


def _compare(experiment: Experiment, samples: _Samples, arm: str, *, is_over: bool) -> ArmComparison:
    """`is_over`: no more samples follow."""
    control, tested, differences = experiment.arms[0].name, 0, dict[str, Bounds | None]()
    last = min(experiment.max_blocks, samples.count) if is_over else experiment.max_blocks
    for count, share in interim_tests(experiment.min_blocks, last):
        if count > samples.count:
            break
        # On either side, for each arm but the control.
        error = experiment.alpha * share / 2 / (len(experiment.arms) - 1)
        tested = count
        differences = {name: samples.difference(count, arm, control, name, error) for name in MEASURES}
        found = differences["objective"]
        if found is not None and (found.high < 0 or found.low > 0):
            return ArmComparison(arm, "better" if found.high < 0 else "worse", tested, differences)
    return ArmComparison(arm, "no difference shown" if is_over else "open", tested, differences)


class _Samples(Protocol):
    @property
    def count(self) -> int: ...

    def difference(self, count: int, arm: str, control: str, measure: str, error: float) -> Bounds | None:
        """The difference in the first `count` samples; the true one lies beyond each bound with probability `error`."""


class _Blocks:
    """Samples by time: blocks in which each arm was measured."""

    def __init__(self, experiment: Experiment, reports: Sequence[SliceReport]) -> None:
        by_block: defaultdict[int, dict[str, SliceCounts]] = defaultdict(dict)
        for report in reports:
            arms = by_block[report.slice // experiment.block_slices]
            arms[report.arm] = arms.get(report.arm, SliceCounts()) + report.counts
        self._blocks: list[dict[str, Measures]] = []
        for _, arms in sorted(by_block.items()):
            found = {arm: measures_of(experiment, counts) for arm, counts in arms.items()}
            whole = {arm: measures for arm, measures in found.items() if measures is not None}
            if len(whole) == len(experiment.arms):
                self._blocks.append(whole)

    @property
    def count(self) -> int:
        return len(self._blocks)

    def difference(self, count: int, arm: str, control: str, measure: str, error: float) -> Bounds | None:
        """The mean difference in the first `count` blocks."""
        return mean_bounds([one[arm][measure] - one[control][measure] for one in self._blocks[:count]], error)


class _Machines:
    """Samples by worker: machines, in slices in which each arm was measured."""

    def __init__(self, experiment: Experiment, reports: Sequence[SliceReport]) -> None:
        counts: defaultdict[tuple[int, str, str], SliceCounts] = defaultdict(SliceCounts)
        for report in reports:
            counts[report.slice, report.arm, report.unit] += report.counts
        by_slice: defaultdict[int, dict[str, dict[str, Measures]]] = defaultdict(lambda: defaultdict(dict))
        for (number, arm, machine), summed in counts.items():
            measures = measures_of(experiment, summed)
            if measures is not None:
                by_slice[number][arm][machine] = measures
        whole = [arms for _, arms in sorted(by_slice.items()) if len(arms) == len(experiment.arms)]
        self._slices: list[dict[str, dict[str, Measures]]] = whole

    @property
    def count(self) -> int:
        return len(self._slices)

    def difference(self, count: int, arm: str, control: str, measure: str, error: float) -> Bounds | None:
        """The difference between the machines' means in the first `count` slices; None: there are fewer than
        `MIN_MACHINES` of one arm."""
        found: dict[str, defaultdict[str, list[float]]] = {arm: defaultdict(list), control: defaultdict(list)}
        for arms in self._slices[:count]:
            middle = fmean(fmean(each[measure] for each in machines.values()) for machines in arms.values())
            for name, machines in found.items():
                for machine, measures in arms[name].items():
                    machines[machine].append(measures[measure] - middle)
        means = {name: [fmean(each) for each in machines.values()] for name, machines in found.items()}
        if min(map(len, means.values())) < MIN_MACHINES:
            return None
        return difference_bounds(means[arm], means[control], error)


def _summary(experiment: Experiment, arm: str, reports: Sequence[SliceReport]) -> ArmSummary:
    by_slice: defaultdict[int, SliceCounts] = defaultdict(SliceCounts)
    own = [report for report in reports if report.arm == arm]
    for report in own:
        by_slice[report.slice] += report.counts
    measured = [found for counts in by_slice.values() if (found := measures_of(experiment, counts)) is not None]
    return ArmSummary(
        arm,
        len(measured),
        len({report.unit for report in own}),
        sum((report.counts for report in own), SliceCounts()),
        {name: mean_bounds([one[name] for one in measured], experiment.alpha / 2) for name in MEASURES},
    )
