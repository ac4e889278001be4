"""The arithmetic of the scaling policy: live and starting workers, and the number of workers that some work needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Demand:
    """The remaining work of one job.

    Attributes:
        seconds: seconds of one worker.
        due: seconds from now until its deadline; None: it has none.
        waited: seconds since it was submitted.
        bulk: it belongs to the bulk tier.
    """

    seconds: float
    due: float | None = None
    waited: float = 0.0
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class PendingStart:
    """`count` workers that were requested at `since` and are not live yet."""

    count: int
    since: float

    def ready_in(self, cold_start_seconds: float, now: float) -> tuple[int, float]:
        """Number of workers, and seconds until they are ready. Workers that are long overdue count as if they were
        requested now: where no machines are available, counting on them would silently miss deadlines."""
        left = self.since + cold_start_seconds - now
        return self.count, left if left > 0 else 0.0 if left > -cold_start_seconds else cold_start_seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """Live workers, starting workers (number, seconds until ready), and the cold start of a further one in seconds."""

    live: int
    coming: tuple[tuple[int, float], ...]
    cold_start_seconds: float


def awaited(
    starting: Sequence[PendingStart], live_before: int, live: int, desired: int, now: float
) -> tuple[PendingStart, ...]:
    """The workers that are still starting. New live workers are matched to the oldest requests; a worker that went away
    (an interrupted spot machine) is requested again from now on."""
    came = max(0, live - live_before)
    left: list[PendingStart] = []
    for start in starting:
        taken = min(came, start.count)
        came -= taken
        if start.count > taken:
            left.append(PendingStart(start.count - taken, start.since))
    missing = max(0, desired - live)
    pending: list[PendingStart] = []
    for start in left:
        if missing > 0:
            pending.append(PendingStart(min(start.count, missing), start.since))
            missing -= pending[-1].count
    if missing > 0:
        pending.append(PendingStart(missing, now))
    return tuple(pending)


def workers_for(fleet: Fleet, demands: Sequence[Demand], usable: Callable[[float], float], margin: float) -> int:
    """The smallest number of workers that completes each demand in time, earliest deadline first.

    By each deadline all work that is due until then must be done (the demand bound of EDF; Baruah et al. 1990). A
    deadline that is too near for a worker's cold start requires no further worker.

    Args:
        demands: each with `due`.
        usable: seconds until a deadline -> seconds of these that count.
        margin: factor on the estimated work.
    """
    most, work = 0, 0.0
    for demand in sorted(demands, key=lambda one: one.due or 0.0):
        work += demand.seconds * margin
        most = max(most, _for_one(fleet, work, usable(max(0.0, demand.due or 0.0))))
    return most


def _for_one(fleet: Fleet, work: float, horizon: float) -> int:
    """Workers that complete the work within `horizon` seconds: first live ones, then starting ones, the soonest first,
    then new ones."""
    if horizon <= 0:
        return fleet.live
    if work <= fleet.live * horizon:
        return ceil(work / horizon - 1e-9)
    count, left = fleet.live, work - fleet.live * horizon
    for coming, ready in sorted(fleet.coming, key=lambda one: one[1]):
        each = horizon - ready
        if each <= 0:
            count += coming  # they are too late for this deadline; a new one would be, too
            continue
        if left <= coming * each:
            return count + ceil(left / each - 1e-9)
        count, left = count + coming, left - coming * each
    each = horizon - fleet.cold_start_seconds
    return count if each <= 0 else count + ceil(left / each - 1e-9)
