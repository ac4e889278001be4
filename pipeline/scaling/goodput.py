"""The goodput of a pool: the share of its answers that kept their latency promise, as gateways report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.lane.ports import NO_ANSWERS, AnswerCounts
from pipeline.scaling.pool_observer import Pool

MIN_ANSWERS: Final = 20
"""Answers that a share needs; fewer are carried over to the next observation."""

WINDOW_SECONDS: Final = 300.0
"""Time after which too few answers are discarded."""


@dataclass(frozen=True, slots=True)
class GoodputWindow:
    """The start of the next share's window: the answers until then, the time (seconds; None: there is none yet) and the
    number of live workers."""

    answers: AnswerCounts = NO_ANSWERS
    since: float | None = None
    live: int = 0


def observe_goodput(
    pool: Pool, answers: Mapping[str, AnswerCounts], before: GoodputWindow, live: int, now: float
) -> tuple[float | None, GoodputWindow]:
    """The share of the pool's answers in time since the last one, and the state for the next. None: too few answers.

    A change of the number of live workers begins a new window: answers of a smaller pool don't judge the larger one.
    So does a count that fell: the lane was emptied. Prefill workers answer for first tokens only, and decode workers
    for the time between tokens.

    Args:
        answers: by name of the model.  live: workers of the pool.  now: seconds.
    """
    counts = sum((answers.get(name, NO_ANSWERS) for name in pool.models), NO_ANSWERS)
    anew = GoodputWindow(counts, now, live)
    in_time = counts.in_time - before.answers.in_time
    first, later = (
        counts.late_first_tokens - before.answers.late_first_tokens,
        counts.late_tokens - before.answers.late_tokens,
    )
    if before.since is None or before.live != live or min(in_time, first, later) < 0:
        return None, anew
    total = in_time + first + later
    if total < MIN_ANSWERS:
        return None, before if now - before.since < WINDOW_SECONDS else anew
    missed = {"prefill": first, "decode": later, "both": first + later}[pool.role]
    return 1 - missed / total, anew
