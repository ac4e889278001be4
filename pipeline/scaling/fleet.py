"""Workers that are there or coming, and how many of them some work needs: the arithmetic of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Demand:
    """What is left of one job.

    Attributes:
        seconds: of one worker.
        due: seconds from now until its deadline; None: it has none.
        waited: seconds since it came.
        bulk: it is of the tier that waits for room.
    """

    seconds: float
    due: float | None = None
    waited: float = 0.0
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class PendingStart:
    """So many workers were wished for at this moment, and haven't been seen."""

    count: int
    since: float

    def ready_in(self, cold_start: float, now: float) -> tuple[int, float]:
        """How many, and in how many seconds. Those that are long overdue may come as late as any: where there are no
        machines to be had, counting on them would miss deadlines in silence."""
        left = self.since + cold_start - now
        return self.count, left if left > 0 else 0.0 if left > -cold_start else cold_start


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that live, those that come (how many, in how many seconds), and what a further one takes to come."""

    live: int
    coming: tuple[tuple[int, float], ...]
    cold_start: float


def awaited(
    starting: Sequence[PendingStart], live_before: int, live: int, desired: int, now: float
) -> tuple[PendingStart, ...]:
    """The workers that are still to come: those that came were the first to be asked for, and whoever went (a spot
    machine taken away) is asked for again from now on."""
    came = max(0, live - live_before)
    left: list[PendingStart] = []
    for start in starting:
        taken = min(came, start.count)
        came -= taken
        if start.count > taken:
            left.append(PendingStart(start.count - taken, start.since))
    missing = max(0, desired - live)
    kept: list[PendingStart] = []
    for start in left:
        if missing > 0:
            kept.append(PendingStart(min(start.count, missing), start.since))
            missing -= kept[-1].count
    if missing > 0:
        kept.append(PendingStart(missing, now))
    return tuple(kept)


def workers_for(fleet: Fleet, demands: Sequence[Demand], usable: Callable[[float], float], margin: float) -> int:
    """The least number of workers that end every demand in its time, earliest deadline first.

    By any deadline all work that is due until then must be done (the demand bound of EDF; Baruah et al. 1990). A
    deadline too near for a worker that would have to be started first asks for none.

    Args:
        demands: each with `due`.  usable: of the seconds until a deadline, how many count.
        margin: times the work that is reckoned with.
    """
    most, work = 0, 0.0
    for demand in sorted(demands, key=lambda one: one.due or 0.0):
        work += demand.seconds * margin
        most = max(most, _for_one(fleet, work, usable(max(0.0, demand.due or 0.0))))
    return most


def _for_one(fleet: Fleet, work: float, horizon: float) -> int:
    """Workers that have so much done when `horizon` seconds have passed: first those that live, then those that come,
    the soonest first, then new ones."""
    if horizon <= 0:
        return fleet.live
    if work <= fleet.live * horizon:
        return ceil(work / horizon - 1e-9)
    count, left = fleet.live, work - fleet.live * horizon
    for coming, ready in sorted(fleet.coming, key=lambda one: one[1]):
        each = horizon - ready
        if each <= 0:
            count += coming  # they are late for this one; a new one would be, too
            continue
        if left <= coming * each:
            return count + ceil(left / each - 1e-9)
        count, left = count + coming, left - coming * each
    each = horizon - fleet.cold_start
    return count if each <= 0 else count + ceil(left / each - 1e-9)
