"""Regions of a simulation, read from a TOML file:

    [[region]]                     # in the order of preference, where costs are equal
    name = "eu-central-1"
    gpus = 8
    price_per_hour = 1.0           # of a worker; or 24 prices, one for each hour of the day, in UTC
    transfer_price_per_gb = 0.02   # of data that is sent to another region
    utc_offset_hours = 1           # of its callers: shifts the arrivals of a drawn trace

    [[outage]]                     # of a whole region, in seconds of the simulated time
    region = "eu-central-1"
    begin = 36000
    end = 50000

    [tenants]                      # those whose data must stay in some regions
    tenant-0 = ["eu-central-1"]

The prices are known in advance: the forecast is the table itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipeline.ports import PipelineError
from pipeline.scaling.regions import PriceFrom
from pipeline.simulator.trace import Pattern, Trace, TracedJob, TraceSettings, draw_trace

HOUR: Final = 3_600.0
DAY: Final = 24
FORECAST_HOURS: Final = 48
BYTES_PER_TOKEN: Final = 4.0

Name = Annotated[str, Field(min_length=1, max_length=100)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DayOfPrices = Annotated[
    tuple[Amount, ...],
    Field(min_length=DAY, max_length=DAY),
    BeforeValidator(lambda given: (given,) * DAY if isinstance(given, int | float) else given),
]
"""24 prices, given as such or as one number for all hours."""


class BadRegions(PipelineError):
    """Raised when a file doesn't describe regions, or a trace doesn't suit them."""


class SimulatedRegion(BaseModel):
    """A region; the module describes its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    gpus: Annotated[int, Field(ge=1, le=10_000)]
    price_per_hour: DayOfPrices
    transfer_price_per_gb: Amount = 0.0
    utc_offset_hours: Annotated[float, Field(ge=-12, le=14)] = 0.0

    def prices(self, now: float, until: float) -> Iterator[PriceFrom]:
        """The price now, and from the beginning of each hour before `until`. Both times are seconds of the simulated
        time; the result's are seconds from now."""
        hour = int(now // HOUR)
        while hour * HOUR < max(until, now + 1.0):
            yield PriceFrom(max(0.0, hour * HOUR - now), self.price_per_hour[hour % DAY])
            hour += 1


class RegionOutage(BaseModel):
    """Seconds without the region."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    region: Name
    begin: Amount
    end: Amount

    @model_validator(mode="after")
    def _in_order(self) -> RegionOutage:
        if self.end <= self.begin:
            raise ValueError(f"begin is {self.begin:g}, and end {self.end:g}: it must be later")
        return self


class RegionSettings(BaseModel):
    """All regions. `tenants`: regions that a tenant's data may be in; tenants that are absent may use all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    region: Annotated[tuple[SimulatedRegion, ...], Field(min_length=1, max_length=100)]
    outage: tuple[RegionOutage, ...] = ()
    tenants: dict[str, Annotated[tuple[Name, ...], Field(min_length=1)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> RegionSettings:
        names = [one.name for one in self.region]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is there twice; leave one")
        named = [outage.region for outage in self.outage] + [name for of in self.tenants.values() for name in of]
        unknown = next((name for name in named if name not in names), None)
        if unknown is not None:
            raise ValueError(f"there is no region {unknown}; the regions are {', '.join(names)}")
        ordered = sorted(self.outage, key=lambda one: (one.region, one.begin))
        for one, following in pairwise(ordered):
            if one.region == following.region and following.begin <= one.end:
                raise ValueError(f"two outages of {one.region} overlap; make them one")
        return self

    def allowed(self, job: TracedJob) -> frozenset[str]:
        """Regions that the job and its tenant allow."""
        names = [one.name for one in self.region]
        return frozenset(job.regions or names) & frozenset(self.tenants.get(job.tenant, names))

    def home(self, job: TracedJob) -> SimulatedRegion:
        """Region where the job's input lies."""
        allowed = self.allowed(job)
        return next(one for one in self.region if one.name == job.home or (job.home is None and one.name in allowed))

    def check(self, trace: Trace) -> None:
        """Raise `BadRegions` for a job that has no region, or whose home is none of those that it may be in."""
        names = {one.name for one in self.region}
        for job in trace.jobs:
            allowed = self.allowed(job)
            unknown = sorted({*(job.regions or ()), *([job.home] if job.home else [])} - names)
            if unknown:
                raise BadRegions(f"{trace.name}: the job at {job.at:g} s names {unknown[0]}, which is no region")
            if not allowed or (job.home is not None and job.home not in allowed):
                raise BadRegions(
                    f"{trace.name}: the job at {job.at:g} s of {job.tenant} may be in "
                    f"{', '.join(sorted(allowed)) or 'no region'}, and its home is {job.home or 'not given'}; correct "
                    "its regions, or its tenant's"
                )


def read_regions(path: Path) -> RegionSettings:
    """Read a file of regions. Raises `BadRegions`."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRegions(f"{path}: can't be read as TOML: {error}") from error
    try:
        return RegionSettings.model_validate(raw)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"])) or "all"
        raise BadRegions(f"{path}: {where}: {detail['msg']}") from error


def draw_regional_trace(pattern: Pattern, drawn: TraceSettings, seed: int, regions: RegionSettings) -> Trace:
    """Draw a trace whose requests come from all regions in equal parts, each in its own time of day. Jobs whose
    tenant's data may not be in a region come from the first one where they may be."""
    each = replace(
        drawn,
        requests=max(1, round(drawn.requests / len(regions.region))),
        jobs=None if drawn.jobs is None else max(1, round(drawn.jobs / len(regions.region))),
    )
    jobs: list[TracedJob] = []
    traces = [draw_trace(pattern, each, seed + number) for number in range(len(regions.region))]
    for region, trace in zip(regions.region, traces, strict=True):
        for job in trace.jobs:
            home = region.name if region.name in regions.allowed(job) else None
            at = (job.at - region.utc_offset_hours * HOUR) % (drawn.hours * HOUR)
            jobs.append(job.model_copy(update={"at": at, "home": home}))
    name = f"{pattern} in {len(regions.region)} regions, seed {seed}"
    return Trace(name, tuple(sorted(jobs, key=lambda job: job.at)), traces[0].interruptions)


def input_bytes(job: TracedJob) -> float:
    """Bytes of a job's input."""
    return BYTES_PER_TOKEN * job.prompt_tokens * job.rows if job.input_bytes is None else job.input_bytes
