"""The choice of an arriving job's region, among installations in several regions: a pure function.

A job may only go where its data may lie. Of these regions, those that complete it in time come first: all work that is
due until each deadline from the job's own on must fit into the time that all workers of the region have until then (the
demand bound of EDF, as in `pipeline.scaling.fleet`). Among them the cheapest is chosen: the job's work at the mean
forecast price of the time in which it is expected to run, and the transfer of its input from its home region. At equal
costs the home region is preferred, then the order of the regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pipeline.ports import PipelineError
from pipeline.scaling.fleet import Demand
from pipeline.scaling.policy import HOUR, usable_seconds, with_deadline
from schemas.settings.autoscaling import ScalingLimits

GIGABYTE = 1e9
_EQUAL_COST = 1e-9
"""Relative difference of costs below which they count as equal: sums of floats."""


class NoAllowedRegion(PipelineError):
    """Raised when none of the available regions may hold the job's data."""


@dataclass(frozen=True, slots=True)
class PriceFrom:
    """The price of a worker-hour from `seconds` from now on, until the next one."""

    seconds: float
    per_hour: float


@dataclass(frozen=True, slots=True)
class RegionState:
    """An available region.

    Attributes:
        prices: current price and forecast, by time; the first is of now (0 seconds), the last one stays.
        max_workers: the most workers that it can have.  live: workers that it has.
        cold_start_seconds: of a further worker.
        demands: its open work.
    """

    name: str
    prices: Sequence[PriceFrom]
    max_workers: int
    live: int = 0
    cold_start_seconds: float = 0.0
    demands: Sequence[Demand] = ()


@dataclass(frozen=True, slots=True)
class RegionalJob:
    """An arriving job.

    Attributes:
        home: region where its input lies.  allowed: regions that its tenant and the job itself allow.
        input_bytes: bytes that another region than `home` must be sent.
        transfer_price_per_gb: price to send 10^9 bytes from `home` to another region.
    """

    demand: Demand
    home: str
    allowed: frozenset[str]
    input_bytes: float = 0.0
    transfer_price_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """A region for a job.

    Attributes:
        cost: estimated, with the transfer.
        load: work over what the region's workers can do, at the tightest deadline that the job affects; above 1 a
            deadline is missed.
    """

    region: str
    cost: float
    load: float


def choose_region(job: RegionalJob, regions: Sequence[RegionState], limits: ScalingLimits) -> RegionChoice:
    """Choose the region of a job.

    Where no region completes it in time, the one with the lowest load is chosen, whatever it costs.

    Args:
        regions: available regions; lost ones are absent. After the job's home, earlier ones are preferred.
        limits: reserves, targets and margin of the scaling policy, which will run the job. `max_workers` and
            `cold_start_seconds` are the regions' own.

    Raises:
        NoAllowedRegion: none of the regions is allowed.
    """
    due = with_deadline(limits, job.demand)
    choices = [
        _choice(job, due, region, limits)
        for region in sorted(regions, key=lambda one: one.name != job.home)  # stable: then in the given order
        if region.name in job.allowed
    ]
    if not choices:
        raise NoAllowedRegion(
            f"the job may run in {', '.join(sorted(job.allowed)) or 'no region'}, and of these none is available; "
            "wait for one, or allow another"
        )
    in_time = [choice for choice in choices if choice.load <= 1]
    if not in_time:
        return min(choices, key=lambda choice: choice.load)
    least = min(choice.cost for choice in in_time)
    return next(choice for choice in in_time if choice.cost <= least * (1 + _EQUAL_COST))


def mean_price(prices: Sequence[PriceFrom], until: float) -> float:
    """Mean price of a worker-hour from now until then. `until`: seconds; 0: the current price."""
    if until <= 0:
        return prices[0].per_hour
    ends = [*(price.seconds for price in prices[1:]), inf]
    total = sum(
        price.per_hour * max(0.0, min(end, until) - price.seconds) for price, end in zip(prices, ends, strict=True)
    )
    return total / until


def _choice(job: RegionalJob, due: Demand, region: RegionState, limits: ScalingLimits) -> RegionChoice:
    load, own_seconds = _load(due, region, limits)
    left = usable_seconds(limits, max(0.0, due.due or 0.0))
    # The autoscaler aims at a part of the time until the deadline, unless the region's workers need longer.
    price = mean_price(region.prices, max(limits.target_share * left, own_seconds))
    moved = 0.0 if region.name == job.home else job.input_bytes / GIGABYTE * job.transfer_price_per_gb
    return RegionChoice(region.name, due.seconds / HOUR * price + moved, load)


def _load(due: Demand, region: RegionState, limits: ScalingLimits) -> tuple[float, float]:
    """The highest load at any deadline from the job's own on, and the seconds in which all workers of the region
    complete the job and the work that is due before it."""
    further = region.max_workers - region.live
    work, load, own_seconds = 0.0, 0.0, 0.0
    demands = sorted(
        [with_deadline(limits, demand) for demand in region.demands] + [due], key=lambda one: one.due or 0.0
    )
    for demand in demands:
        work += demand.seconds * limits.work_factor
        if (demand.due or 0.0) < (due.due or 0.0):
            continue
        left = usable_seconds(limits, max(0.0, demand.due or 0.0))
        capacity = region.live * left + further * max(0.0, left - region.cold_start_seconds)
        load = max(load, work / capacity if capacity > 0 else inf)
        if demand is due:
            own_seconds = region.cold_start_seconds + work / region.max_workers
    return load, own_seconds
