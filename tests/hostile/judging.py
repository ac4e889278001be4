"""The criteria of a run: processes, memory, TTFT of the well-behaved tenant, its batch, and the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.hostile.well_behaved import GIVE_UP_SECONDS, Sample

if TYPE_CHECKING:
    from tests.hostile.run import Outcome

MAX_GROWTH_BYTES: Final = 512 << 20
MAX_TTFT_RATIO: Final = 3.0
QUANTILE: Final = 0.95
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """A criterion, whether it holds, and what was found."""

    criterion: str
    holds: bool
    found: str


def ttft_quantile(samples: Sequence[Sample], quantile: float = QUANTILE) -> float:
    """Of all chats (nearest rank): one without a whole answer counts as one that came when it was given up."""
    seconds = sorted(
        sample.ttft if sample.ttft is not None and sample.error is None else GIVE_UP_SECONDS for sample in samples
    )
    return seconds[max(0, math.ceil(quantile * len(seconds)) - 1)] if seconds else math.nan


def judge(outcome: Outcome) -> list[Verdict]:
    """All criteria, in the order of the table."""
    return [_processes(outcome), *_memory(outcome), _ttft(outcome), _batch(outcome), _answers(outcome)]


def _processes(outcome: Outcome) -> Verdict:
    holds = not outcome.deaths and not outcome.restarts and outcome.pids_before == outcome.pids_after
    names = sorted({death.name for death in outcome.deaths})
    found = f"{len(outcome.deaths)} deaths" + (f" ({', '.join(names)})" if names else "")
    return Verdict("all processes live, with the pids of the start", holds,
                   f"{found}, {len(outcome.restarts)} restarts by hand")  # fmt: skip


def _memory(outcome: Outcome) -> list[Verdict]:
    verdicts = []
    for name, before in outcome.memory_before.items():
        peak = max((result.peaks.get(name, 0) for result in outcome.results), default=0)
        after = outcome.memory_after.get(name, 0)
        holds = max(peak, after) <= before + MAX_GROWTH_BYTES and after > 0
        found = f"start {before // MIB}, peak {peak // MIB}, end {after // MIB} MiB"
        verdicts.append(Verdict(f"memory of {name} within {MAX_GROWTH_BYTES // MIB} MiB of the start", holds, found))
    return verdicts


def _ttft(outcome: Outcome) -> Verdict:
    quiet, attacked = ttft_quantile(outcome.quiet), ttft_quantile(outcome.attacked)
    failed = sum(sample.error is not None for sample in outcome.attacked)
    return Verdict(
        f"TTFT p95 of the well-behaved tenant at most {MAX_TTFT_RATIO:g} times its quiet one",
        attacked <= MAX_TTFT_RATIO * quiet,
        f"quiet {quiet:.3f} s, under attack {attacked:.3f} s ({attacked / quiet:.1f} times); "
        f"{failed} of {len(outcome.attacked)} chats failed",
    )


def _batch(outcome: Outcome) -> Verdict:
    found = "all rows have their texts" if outcome.batch_wrong is None else outcome.batch_wrong
    return Verdict("the well-behaved tenant's batch is answered rightly", outcome.batch_wrong is None, found)


def _answers(outcome: Outcome) -> Verdict:
    right = sum(result.wrong is None for result in outcome.results)
    return Verdict(
        "each attack is answered as expected", right == len(outcome.results), f"{right} of {len(outcome.results)}"
    )
