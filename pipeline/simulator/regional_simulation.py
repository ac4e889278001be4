"""A simulation of installations in several regions, side by side on one clock.

At each job's arrival, `choose_region` picks its region from the state of all of them. A job runs in one region, from
its bucket; nothing is shared. When a region is lost, its open jobs that may run elsewhere are submitted again there,
from their inputs and from the beginning, and the others wait for their region. The choice is compared with one region
for all jobs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp

from pipeline.scaling.fleet import Demand
from pipeline.scaling.regions import (
    GIGABYTE,
    NoAllowedRegion,
    RegionalJob,
    RegionState,
    choose_region,
    mean_price,
)
from pipeline.simulator.regions import FORECAST_HOURS, HOUR, RegionSettings, SimulatedRegion, input_bytes
from pipeline.simulator.report import is_in_time
from pipeline.simulator.settings import SimulationOutcome, SimulationSettings
from pipeline.simulator.simulation import Simulation
from pipeline.simulator.trace import Trace, TracedJob
from schemas.jobs.job import Tier


@dataclass(frozen=True, slots=True)
class RegionReport:
    """Results of a region, or of all together.

    Attributes:
        jobs: that ended here.  moved: of these, the ones whose home is another region.
        tokens: of rows with a result.
        worker_hours: paid hours.  cost: of these, and of transfers to the region.  transfer_cost: of the latter.
        deadlines, late: jobs with a deadline, and those that missed it.
    """

    name: str
    jobs: int = 0
    moved: int = 0
    tokens: float = 0.0
    worker_hours: float = 0.0
    cost: float = 0.0
    transfer_cost: float = 0.0
    deadlines: int = 0
    late: int = 0

    def __add__(self, other: RegionReport) -> RegionReport:
        return RegionReport(
            self.name, self.jobs + other.jobs, self.moved + other.moved, self.tokens + other.tokens,
            self.worker_hours + other.worker_hours, self.cost + other.cost, self.transfer_cost + other.transfer_cost,
            self.deadlines + other.deadlines, self.late + other.late,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RegionalOutcome:
    """The outcome of a regional simulation.

    Attributes:
        outcomes: of each region's installation; the id of a job's order is its number in the trace.
        transferred: cost of the transfers to each region.
    """

    outcomes: Mapping[str, SimulationOutcome]
    transferred: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RegionalReport:
    """Results of a regional simulation.

    Attributes:
        total: of all regions.
        single: the total of each region to which all jobs may go, if all of them go there.
        best_single: of these, the cheapest of those with the fewest late jobs; None: no region may take all jobs.
    """

    trace: str
    worker: str
    regions: tuple[RegionReport, ...]
    total: RegionReport
    single: tuple[RegionReport, ...]
    best_single: str | None


def simulate_regions(
    trace: Trace, settings: SimulationSettings, regions: RegionSettings, only: str | None = None
) -> RegionalOutcome:
    """Simulate the trace to its end.

    Args:
        settings: of each installation; the number of its workers is its region's `gpus`. Interruptions come to all.
        only: region to which all jobs go; None: `choose_region` decides.

    Raises:
        BadRegions: a job has no region where it may be.
    """
    regions.check(trace)
    return _RegionalSimulation(trace, settings, regions, only).run()


def regional_report(trace: Trace, settings: SimulationSettings, regions: RegionSettings) -> RegionalReport:
    """Simulate the trace with the choice, and with each region alone. Raises `BadRegions`."""
    found = _evaluate(trace, regions, simulate_regions(trace, settings, regions))
    for_all = frozenset[str].intersection(*(regions.allowed(job) for job in trace.jobs))
    single = []
    for region in regions.region:
        if region.name in for_all:
            alone = _evaluate(trace, regions, simulate_regions(trace, settings, regions, region.name))
            single.append(_total(alone, region.name))
    best = min(single, key=lambda one: (one.late, one.cost), default=None)
    return RegionalReport(
        trace=trace.name,
        worker=settings.worker.name,
        regions=found,
        total=_total(found, "all"),
        single=tuple(single),
        best_single=None if best is None else best.name,
    )


class _RegionalSimulation:
    def __init__(self, trace: Trace, settings: SimulationSettings, regions: RegionSettings, only: str | None) -> None:
        self._trace = trace
        self._settings = settings
        self._regions = regions
        self._only = only
        self._lost: set[str] = set()
        self._transferred = {region.name: 0.0 for region in regions.region}
        # Answers don't depend on the region, so that choices can be compared.
        rng = random.Random(f"answers/{settings.seed}")
        self._answer_factors = [exp(rng.gauss(0.0, settings.answer_error)) for _ in trace.jobs]
        ends = [outage.end for outage in regions.outage]
        last = max([*(job.at for job in trace.jobs), *ends], default=0.0)
        self._simulations = {region.name: self._installation(region, last) for region in regions.region}

    def _installation(self, region: SimulatedRegion, last_arrival: float) -> Simulation:
        fixed = None if self._settings.fixed_workers is None else region.gpus
        limits = self._settings.scaling
        limits = limits.model_copy(
            update={"max_workers": region.gpus, "min_workers": min(limits.min_workers, region.gpus)}
        )
        simulation = Simulation(replace(self._settings, scaling=limits, fixed_workers=fixed), last_arrival)
        for interruption in self._trace.interruptions:
            simulation.interrupt(interruption)
        return simulation

    def run(self) -> RegionalOutcome:
        moments = [(outage.begin, 0, number) for number, outage in enumerate(self._regions.outage)]
        moments += [(outage.end, 1, number) for number, outage in enumerate(self._regions.outage)]
        moments += [(job.at, 2, number) for number, job in enumerate(self._trace.jobs)]
        for simulation in self._simulations.values():
            simulation.start()
        for now, kind, number in sorted(moments):
            for simulation in self._simulations.values():
                simulation.advance(now)
            if kind == 2:
                self._submit(self._trace.jobs[number], number)
                continue
            name = self._regions.outage[number].region
            if kind == 0:
                self._lose(name, now)
            else:
                self._lost.remove(name)
                self._simulations[name].restore()
        return RegionalOutcome(
            {name: simulation.finish() for name, simulation in self._simulations.items()}, self._transferred
        )

    def _lose(self, name: str, now: float) -> None:
        """Lose a region: its jobs are submitted again where they may go, with what is left of their deadlines."""
        self._lost.add(name)
        simulation = self._simulations[name]
        for job in simulation.lose():
            number = int(job.order.id)
            traced = self._trace.jobs[number]
            if self._allowed(traced) - self._lost:
                simulation.withdraw(job)
                deadline = None if job.due is None else job.due - now
                self._submit(traced.model_copy(update={"at": now, "deadline": deadline}), number)

    def _allowed(self, job: TracedJob) -> frozenset[str]:
        return self._regions.allowed(job) if self._only is None else frozenset({self._only})

    def _submit(self, job: TracedJob, number: int) -> None:
        home = self._regions.home(job)
        name = self._choose(job, home)
        if name != home.name:
            self._transferred[name] += input_bytes(job) / GIGABYTE * home.transfer_price_per_gb
        self._simulations[name].submit(job, number, self._answer_factors[number])
        # The next choice may be made at the same time, and counts this job.
        self._simulations[name].advance(job.at)

    def _choose(self, job: TracedJob, home: SimulatedRegion) -> str:
        worker, allowed = self._settings.worker, self._allowed(job)
        seconds = worker.seconds(job.rows, job.prompt_tokens, job.output_tokens)
        arriving = RegionalJob(
            Demand(seconds, job.deadline, bulk=job.tier is Tier.BULK),
            home.name, allowed, input_bytes(job), home.transfer_price_per_gb,
        )  # fmt: skip
        states = [
            RegionState(
                region.name,
                tuple(region.prices(job.at, job.at + FORECAST_HOURS * HOUR)),
                region.gpus,
                self._simulations[region.name].live,
                worker.cold_start_seconds,
                self._simulations[region.name].demands(),
            )
            for region in self._regions.region
            if region.name not in self._lost
        ]
        try:
            return choose_region(arriving, states, self._settings.scaling).region
        except NoAllowedRegion:  # it waits in the bucket of a lost region
            return home.name if home.name in allowed else min(allowed)


def _evaluate(trace: Trace, regions: RegionSettings, found: RegionalOutcome) -> tuple[RegionReport, ...]:
    reports = []
    for region in regions.region:
        outcome = found.outcomes[region.name]
        with_due = [job for job in outcome.jobs if job.due is not None]
        homes = [regions.home(trace.jobs[int(job.order.id)]).name for job in outcome.jobs]
        transfer_cost = found.transferred[region.name]
        cost = transfer_cost + sum(
            (end - begin) / HOUR * mean_price(tuple(region.prices(begin, end)), end - begin)
            for begin, end in outcome.paid
            if end > begin
        )
        reports.append(
            RegionReport(
                name=region.name,
                jobs=len(outcome.jobs),
                moved=sum(home != region.name for home in homes),
                tokens=sum((job.rows - job.rows_left) * (job.prompt + job.answer) for job in outcome.jobs),
                worker_hours=outcome.worker_seconds / HOUR,
                cost=cost,
                transfer_cost=transfer_cost,
                deadlines=len(with_due),
                late=sum(not is_in_time(job.ended, job.due, job.rows_left) for job in with_due),
            )
        )
    return tuple(reports)


def _total(reports: tuple[RegionReport, ...], name: str) -> RegionReport:
    return sum(reports, RegionReport(name))
