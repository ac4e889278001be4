"""Many histories: over all cores, with a summary that shows whether the faults really happened; and the smallest form
of one that broke."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tests.simulation.history import Outcome, simulate
from tests.simulation.root.history import simulate_root
from tests.simulation.root.scenario import WEIGHTS as ROOT_WEIGHTS
from tests.simulation.root.scenario import RootScenario, draw_root
from tests.simulation.scenario import WEIGHTS, Scenario, draw

CHUNK = 10
AnyScenario = Scenario | RootScenario


@dataclass(frozen=True)
class Kind:
    """A kind of histories. `faults`: all that may be drawn."""

    draw: Callable[[int], AnyScenario]
    faults: Mapping[str, int]


KINDS = {"job": Kind(draw, WEIGHTS), "root": Kind(draw_root, ROOT_WEIGHTS)}
"""One job from its order to its outcome; many jobs of many tenants, with all that works on them."""


def run_scenario(scenario: AnyScenario) -> Outcome:
    """Run one history, of whatever kind."""
    return simulate_root(scenario) if isinstance(scenario, RootScenario) else simulate(scenario)


def read_scenario(text: str) -> AnyScenario:
    """A scenario from its JSON."""
    return RootScenario.from_json(text) if "root" in json.loads(text) else Scenario.from_json(text)


@dataclass(slots=True)
class Summary:
    """What a campaign saw.

    Attributes:
        faults: those that may have struck.
        broken: seed -> what was broken.
        seconds: simulated, from the end of a history's last fault to the end of its jobs.
    """

    faults: Mapping[str, int]
    histories: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one more history."""
        self.histories += 1
        self.counters += outcome.counters
        if any(outcome.counters[kind] for kind in self.faults):
            self.seconds.append(outcome.seconds)
        if outcome.broken is not None:
            self.broken[outcome.seed] = outcome.broken

    @property
    def missing(self) -> list[str]:
        """Kinds of faults that never struck."""
        return [kind for kind in self.faults if not self.counters[kind]]

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        yield f"{self.histories:,} histories, {len(self.broken)} broken"
        faults = ", ".join(f"{kind} {self.counters[kind]:,}" for kind in self.faults)
        yield f"faults: {faults}"
        if self.seconds:
            ordered = sorted(self.seconds)
            late = ordered[len(ordered) * 99 // 100]
            yield (
                f"simulated seconds from the last fault to the end: median {statistics.median(ordered):.0f}, "
                f"99 % within {late:.0f}, at most {ordered[-1]:.0f}"
            )
        rest = sorted(self.counters.keys() - self.faults.keys())
        yield ", ".join(f"{name} {self.counters[name]:,}" for name in rest)


def run_seeds(
    seeds: Sequence[int],
    *,
    kind: str = "job",
    processes: int | None = None,
    on_outcome: Callable[[Summary, Outcome], None] | None = None,
) -> Summary:
    """Simulate the histories of these seeds.

    Args:
        kind: of `KINDS`.  processes: how many at once; None: one for each core.  on_outcome: called after each.
    """
    summary = Summary(KINDS[kind].faults)
    for outcome in _outcomes(seeds, kind, processes or os.cpu_count() or 1):
        summary.add(outcome)
        if on_outcome is not None:
            on_outcome(summary, outcome)
    return summary


def _outcomes(seeds: Sequence[int], kind: str, processes: int) -> Iterator[Outcome]:
    run = partial(run_seed, kind=kind)
    if processes == 1:
        yield from map(run, seeds)
        return
    # Spawned, not forked: arrow's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=CHUNK)


def run_seed(seed: int, kind: str = "job") -> Outcome:
    """The history of a seed, without its trace."""
    return replace(run_scenario(KINDS[kind].draw(seed)), trace=[])


def first_broken(seeds: Iterable[int], kind: str = "job") -> Outcome | None:
    """The first history that breaks, if any does."""
    for seed in seeds:
        outcome = run_scenario(KINDS[kind].draw(seed))
        if outcome.broken is not None:
            return outcome
    return None


def minimise(scenario: AnyScenario) -> AnyScenario:
    """The scenario with everything left out that it doesn't need to break in the same way."""
    kind = run_scenario(scenario).kind
    assert kind, "nothing is broken"
    smaller = True
    while smaller:
        smaller = False
        for candidate in scenario.smaller():
            if run_scenario(candidate).kind == kind:
                scenario, smaller = candidate, True
                break
    return scenario
