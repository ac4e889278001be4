"""Many histories: over all cores, with a summary that shows whether the faults really happened; and the smallest form
of one that broke."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tests.simulation.history import Outcome, simulate
from tests.simulation.scenario import WEIGHTS, Scenario, draw

CHUNK = 10


@dataclass(slots=True)
class Summary:
    """What a campaign saw.

    Attributes:
        broken: seed -> what was broken.
        seconds: simulated, from the end of a history's last fault to the end of its job.
    """

    histories: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one more history."""
        self.histories += 1
        self.counters += outcome.counters
        if any(outcome.counters[kind] for kind in WEIGHTS):
            self.seconds.append(outcome.seconds)
        if outcome.broken is not None:
            self.broken[outcome.seed] = outcome.broken

    @property
    def missing(self) -> list[str]:
        """Kinds of faults that never struck."""
        return [kind for kind in WEIGHTS if not self.counters[kind]]

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        yield f"{self.histories:,} histories, {len(self.broken)} broken"
        faults = ", ".join(f"{kind} {self.counters[kind]:,}" for kind in WEIGHTS)
        yield f"faults: {faults}"
        if self.seconds:
            ordered = sorted(self.seconds)
            late = ordered[len(ordered) * 99 // 100]
            yield (
                f"simulated seconds from the last fault to the job's end: median {statistics.median(ordered):.0f}, "
                f"99 % within {late:.0f}, at most {ordered[-1]:.0f}"
            )
        rest = sorted(self.counters.keys() - WEIGHTS.keys())
        yield ", ".join(f"{name} {self.counters[name]:,}" for name in rest)


def run_seeds(
    seeds: Sequence[int], *, processes: int | None = None, tell: Callable[[Summary, Outcome], None] | None = None
) -> Summary:
    """Simulate the histories of these seeds.

    Args:
        processes: how many at once; None: one for each core.  tell: called after each.
    """
    summary = Summary()
    for outcome in _outcomes(seeds, processes or os.cpu_count() or 1):
        summary.add(outcome)
        if tell is not None:
            tell(summary, outcome)
    return summary


def _outcomes(seeds: Sequence[int], processes: int) -> Iterator[Outcome]:
    if processes == 1:
        yield from map(run_seed, seeds)
        return
    # Spawned, not forked: arrow's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=CHUNK)


def run_seed(seed: int) -> Outcome:
    """The history of a seed, without its trace."""
    return replace(simulate(draw(seed)), trace=[])


def first_broken(seeds: Iterable[int]) -> Outcome | None:
    """The first history that breaks, if any does."""
    for seed in seeds:
        outcome = simulate(draw(seed))
        if outcome.broken is not None:
            return outcome
    return None


def minimise(scenario: Scenario) -> Scenario:
    """The scenario with everything left out that it doesn't need to break in the same way."""
    kind = simulate(scenario).kind
    assert kind, "nothing is broken"
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            if simulate(candidate).kind == kind:
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less."""
    for at in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:at] + scenario.faults[at + 1 :])
    for name in ("planners", "dispatchers", "workers"):
        if getattr(scenario, name) > 1:
            yield replace(scenario, **{name: getattr(scenario, name) - 1})
    if scenario.deadline is not None:
        yield replace(scenario, deadline=None)
    for at in reversed(range(len(scenario.lines))):
        if len(scenario.lines) > 1:
            yield replace(scenario, lines=scenario.lines[:at] + scenario.lines[at + 1 :])
