"""The comparison of an experiment's arms: a pure function of its closed blocks (`pipeline.experiments.blocks`), which
are added one after the other.

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

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal, Protocol

from pipeline.sequential_test import difference_bounds, interim_tests, mean_bounds
from schemas.experiments import ClosedBlock, Experiment, SliceCounts
from schemas.releases import Bounds

MIN_MACHINES: Final = 3
"""Machines of each arm for a verdict, if machines are the samples."""

MEASURES: Final = ("objective", "late_first_tokens", "late_tokens", "held_back", "drops", "tokens_per_second")

Verdict = Literal["better", "worse", "no difference shown", "undecided"]
Measures = Mapping[str, float]
ArmCounts = Mapping[str, Mapping[str, SliceCounts]]
"""Arm -> machine -> what its workers measured in a block."""


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
        verdict: by the objective. "no difference shown": no more samples follow.
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
        tested = f", at {self.tested} samples" if self.tested else ", without a test"
        return f"{self.arm}: {self.verdict}{words}{tested}"


@dataclass(frozen=True, slots=True)
class ExperimentComparison:
    """All arms of an experiment.

    Attributes:
        blocks: number of closed ones.
        samples: number of blocks in which each arm was measured, so that they can be compared.
        next_test: samples of the next interim test; 0: there is none.
        reports, unusable: numbers of reports in the blocks, and of those that could not be used.
    """

    blocks: int
    samples: int
    next_test: int
    reports: int
    unusable: int
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[ArmComparison, ...]


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


def compare_arms(experiment: Experiment, blocks: Iterable[ClosedBlock]) -> ExperimentComparison:
    """Compare the arms by these blocks, of which none is missing from the first one on."""
    running = RunningComparison(experiment)
    for block in blocks:
        running.add(block)
    return running.result()


class RunningComparison:
    """Compares the arms, and tests them as soon as a test is due. Its memory grows with the numbers of blocks and of
    machines, not with that of reports.

    Attributes:
        blocks: number of those that were added.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.blocks = 0
        self._reports = self._unusable = 0
        self._arms = {arm.name: _ArmSums() for arm in experiment.arms}
        self._samples: _Samples = (_Blocks if experiment.assignment == "time" else _Machines)(experiment)
        self._tests = interim_tests(experiment.min_blocks, experiment.max_blocks)
        self._due, self._share = next(self._tests)
        self._tested = 0
        self._found = {arm.name: ArmComparison(arm.name, "undecided", 0, {}) for arm in experiment.arms[1:]}

    @property
    def is_decided(self) -> bool:
        """Whether each arm has its verdict."""
        return all(one.verdict != "undecided" for one in self._found.values())

    def add(self, block: ClosedBlock) -> None:
        """Add the next block, and test if that is due. Raises `ValueError` for any other block."""
        if block.block != self.blocks:
            raise ValueError(f"block {block.block} does not follow {self.blocks} others")
        self.blocks += 1
        self._reports += block.reports
        self._unusable += block.unusable
        counts: defaultdict[str, dict[str, SliceCounts]] = defaultdict(dict)
        for one in block.machines:
            counts[one.arm][one.machine] = one.counts
        for arm, machines in counts.items():
            self._arms[arm].add(self.experiment, machines)
        self._samples.add(counts)
        is_over, count = self.blocks == self.experiment.max_blocks, self._samples.count
        if count == self._due or (is_over and count > self._tested and count >= self.experiment.min_blocks):
            self._test(count)
        if is_over:
            for arm, found in self._found.items():
                if found.verdict == "undecided":
                    self._found[arm] = replace(found, verdict="no difference shown")

    def _test(self, count: int) -> None:
        """Test the arms that have no verdict yet."""
        # On either side, for each arm but the control.
        error = self.experiment.alpha * self._share / 2 / len(self._found)
        for arm, before in self._found.items():
            if before.verdict != "undecided":
                continue
            differences = {measure: self._samples.difference(arm, measure, error) for measure in MEASURES}
            verdict: Verdict = "undecided"
            found = differences["objective"]
            if found is not None and (found.high < 0 or found.low > 0):
                verdict = "better" if found.high < 0 else "worse"
            self._found[arm] = ArmComparison(arm, verdict, count, differences)
        self._tested = count
        self._due, self._share = next(self._tests, (0, 0.0))

    def result(self) -> ExperimentComparison:
        """The comparison by the blocks so far."""
        arms = tuple(sums.summary(name, self.experiment.alpha) for name, sums in self._arms.items())
        return ExperimentComparison(
            self.blocks,
            self._samples.count,
            0 if self.is_decided else self._due,
            self._reports,
            self._unusable,
            arms,
            tuple(self._found.values()),
        )


class _Samples(Protocol):
    """Attributes: count: number of samples so far."""

    count: int

    def add(self, counts: ArmCounts) -> None:
        """Add a block; it is left out if an arm was not measured in it."""
        ...

    def difference(self, arm: str, measure: str, error: float) -> Bounds | None:
        """The difference between the arm and the control; the true one lies beyond each bound with probability
        `error`."""
        ...


class _Blocks:
    """Samples by time: blocks."""

    def __init__(self, experiment: Experiment) -> None:
        self.count = 0
        self._experiment = experiment
        self._differences: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, counts: ArmCounts) -> None:
        """See `_Samples.add`."""
        found = {arm: measures_of(self._experiment, _sum(machines)) for arm, machines in counts.items()}
        measured = {arm: measures for arm, measures in found.items() if measures is not None}
        if len(measured) < len(self._experiment.arms):
            return
        self.count += 1
        control, *others = (arm.name for arm in self._experiment.arms)
        for arm in others:
            for name in MEASURES:
                self._differences[arm, name].append(measured[arm][name] - measured[control][name])

    def difference(self, arm: str, measure: str, error: float) -> Bounds | None:
        """The mean difference within the blocks."""
        return mean_bounds(self._differences[arm, measure], error)


class _Machines:
    """Samples by worker: machines. A block is a slice."""

    def __init__(self, experiment: Experiment) -> None:
        self.count = 0
        self._experiment = experiment
        self._slices: Counter[tuple[str, str]] = Counter()  # by arm and machine
        self._distances: defaultdict[tuple[str, str, str], float] = defaultdict(float)  # sums, by measure too

    def add(self, counts: ArmCounts) -> None:
        """See `_Samples.add`."""
        measured: dict[str, dict[str, Measures]] = {}
        for arm, machines in counts.items():
            found = ((machine, measures_of(self._experiment, one)) for machine, one in machines.items())
            measured[arm] = {machine: measures for machine, measures in found if measures is not None}
        if sum(map(bool, measured.values())) < len(self._experiment.arms):
            return
        self.count += 1
        self._slices.update((arm, machine) for arm, machines in measured.items() for machine in machines)
        for name in MEASURES:
            middle = fmean(fmean(each[name] for each in machines.values()) for machines in measured.values())
            for arm, each_measured in measured.items():
                for machine, measures in each_measured.items():
                    self._distances[arm, machine, name] += measures[name] - middle

    def difference(self, arm: str, measure: str, error: float) -> Bounds | None:
        """The difference between the machines' means; None: there are fewer than `MIN_MACHINES` of one arm."""
        means, of_control = self._means(arm, measure), self._means(self._experiment.arms[0].name, measure)
        if min(len(means), len(of_control)) < MIN_MACHINES:
            return None
        return difference_bounds(means, of_control, error)

    def _means(self, arm: str, measure: str) -> list[float]:
        """Of each machine of the arm, in order."""
        return [
            self._distances[arm, machine, measure] / slices
            for (of, machine), slices in sorted(self._slices.items())
            if of == arm
        ]


class _ArmSums:
    """One arm over all blocks."""

    def __init__(self) -> None:
        self._machines: set[str] = set()
        self._counts = SliceCounts()
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, experiment: Experiment, machines: Mapping[str, SliceCounts]) -> None:
        """Add the arm's slice of a block."""
        self._machines.update(machines)
        counts = _sum(machines)
        self._counts += counts
        for name, value in (measures_of(experiment, counts) or {}).items():
            self._values[name].append(value)

    def summary(self, arm: str, alpha: float) -> ArmSummary:
        """The arm so far."""
        means = {name: mean_bounds(self._values[name], alpha / 2) for name in MEASURES}
        return ArmSummary(arm, len(self._values["objective"]), len(self._machines), self._counts, means)


def _sum(machines: Mapping[str, SliceCounts]) -> SliceCounts:
    return sum(machines.values(), SliceCounts())
