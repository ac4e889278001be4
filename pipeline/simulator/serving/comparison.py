"""Compares deployments at equal cost: requests arrive at each in proportion to its price."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from typing import Final

from pipeline.lane.placement import LatencyTargets
from pipeline.planner.estimates.capacity import Hardware, ModelShape
from pipeline.ports import PipelineError
from pipeline.simulator.serving.link import LinkSettings
from pipeline.simulator.serving.replica import ReplicaSettings
from pipeline.simulator.serving.report import ServingReport, serving_report
from pipeline.simulator.serving.requests import LengthDistribution, arrivals, draw_requests
from pipeline.simulator.serving.roofline import LAUNCH_SECONDS, StepRoofline, choose_step_tokens
from pipeline.simulator.serving.simulation import Deployment, WorkerPool, simulate_requests

DEFAULT_LOAD: Final = 0.7
"""Rate of arrivals where none is given, as a share of the first deployment's goodput."""

MIN_REQUESTS: Final = 100
"""That arrive at a rate, however low it is: fewer have no quantiles."""

MIN_RATE: Final = 0.01
"""Requests a second at which the search of a goodput ends without one."""

RATE_TOLERANCE: Final = 0.02
"""Relative difference of rates at which it ends with one."""


class TargetsNotKept(PipelineError):
    """Raised when a load was to be chosen by a goodput, and there is none."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal workers of one kind of device.

    Attributes:
        count: workers.  devices: that share the model in each worker.
    """

    count: int
    hardware: Hardware
    devices: int = 1

    def __str__(self) -> str:
        return f"{self.count}x{'' if self.devices == 1 else f'{self.devices}x'}{self.hardware.name}"

    def price_per_hour(self, prices: Mapping[str, float]) -> float:
        """The price of all of them; `prices`: of one device, by its name."""
        return self.count * self.devices * prices[self.hardware.name]

    @property
    def worker_hardware(self) -> Hardware:
        """A worker's devices as one; what they send each other takes no time."""
        one, number = self.hardware, self.devices
        return replace(one, memory=one.memory * number, bandwidth=one.bandwidth * number, flops=one.flops * number)


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """What is the same for all deployments.

    Attributes:
        mix: lengths of the requests.  cached_share: of each prompt, in the prefix cache.
        seconds: for which requests arrive.  seed: of the requests.
        requests_at_once: so many arrive at once, as a job's rows do, and no target limits the steps; None: they arrive
            at a rate.
        in_time_share: of the requests, for the goodput.
        launch_seconds: of a step.
    """

    model: ModelShape
    mix: Sequence[LengthDistribution]
    targets: LatencyTargets = field(default_factory=LatencyTargets)
    link: LinkSettings = field(default_factory=LinkSettings)
    cached_share: float = 0.0
    seconds: float = 60.0
    requests_at_once: int | None = None
    in_time_share: float = 0.9
    launch_seconds: float = LAUNCH_SECONDS
    seed: int = 0

    def pool(self, machines: Machines) -> WorkerPool:
        """Workers on these machines."""
        roofline = StepRoofline(self.model, machines.worker_hardware, launch_seconds=self.launch_seconds)
        tokens = choose_step_tokens(roofline)
        # Half of a step's tokens, so that prompts are computed beside the rows (`engine/runner/step_size.py`).
        limit = self.targets.itl_seconds if self.requests_at_once is None else inf
        return WorkerPool(machines.count, ReplicaSettings(roofline, tokens, tokens // 2, limit))


@dataclass(frozen=True, slots=True)
class DeploymentCandidate:
    """A deployment with a name and a price."""

    name: str
    deployment: Deployment
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class ComparedDeployment:
    """One deployment's results.

    Attributes:
        requests_per_second: at which requests arrived; None: all at once.
        report: at that rate.
        goodput: the highest rate at which the targets are kept; None: all requests arrived at once.
    """

    name: str
    price_per_hour: float
    requests_per_second: float | None
    report: ServingReport
    goodput: float | None

    @property
    def goodput_per_price(self) -> float | None:
        """Requests in time for each unit of money: goodput of an hour over its price."""
        return None if self.goodput is None else 3_600 * self.goodput / self.price_per_hour


def candidates(
    settings: ComparisonSettings,
    prices: Mapping[str, float],
    whole: Machines,
    split: tuple[Machines, Machines] | None = None,
) -> list[DeploymentCandidate]:
    """The deployments that are compared: whole requests on `whole`; and prefill and decode workers (`split`, or each
    division of `whole`), with requests split where `place` says so, and all of them.

    Args:
        prices: of an hour of one device, by its name.
    """
    found = [
        DeploymentCandidate(f"{whole}, chunked prefill", Deployment(settings.pool(whole)), whole.price_per_hour(prices))
    ]
    divisions = [split] if split is not None else [
        (replace(whole, count=count), replace(whole, count=whole.count - count)) for count in range(1, whole.count)
    ]  # fmt: skip
    for prefill, decode in divisions:
        price = prefill.price_per_hour(prices) + decode.price_per_hour(prices)
        for split_all in (False, True):
            name = f"{prefill} + {decode}, {'always split' if split_all else 'split where it pays'}"
            deployment = Deployment(settings.pool(decode), settings.pool(prefill), split_all)
            found.append(DeploymentCandidate(name, deployment, price))
    return found


def compare_deployments(
    compared: Sequence[DeploymentCandidate],
    settings: ComparisonSettings,
    requests_per_second: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ComparedDeployment]:
    """Simulate deployments under the same load for their price.

    Args:
        requests_per_second: arrivals at the first deployment; None: `DEFAULT_LOAD` of its goodput.
        progress: gets the name of each deployment before it is simulated.

    Raises:
        TargetsNotKept: the first deployment keeps the targets at no rate, and none is given.
        RequestTooLong, DoesNotFit: of `simulate_requests`.
    """
    found = []
    for candidate in compared:
        progress(candidate.name)
        deployment, price = candidate.deployment, candidate.price_per_hour
        if settings.requests_at_once is not None:
            report = _simulate(deployment, settings, inf, settings.requests_at_once)
            found.append(ComparedDeployment(candidate.name, price, None, report, None))
        else:
            goodput = _goodput(deployment, settings)
            if requests_per_second is None:
                requests_per_second = DEFAULT_LOAD * goodput
                if not goodput:
                    raise TargetsNotKept(f"{candidate.name}: the latency targets are kept at no rate; give a rate")
            rate = requests_per_second * price / compared[0].price_per_hour
            report = _simulate_rate(deployment, settings, rate)
            found.append(ComparedDeployment(candidate.name, price, rate, report, goodput))
    return found


def _simulate_rate(deployment: Deployment, settings: ComparisonSettings, rate: float) -> ServingReport:
    return _simulate(deployment, settings, rate, max(MIN_REQUESTS, ceil(rate * settings.seconds)))


def _simulate(deployment: Deployment, settings: ComparisonSettings, rate: float, count: int) -> ServingReport:
    requests = arrivals(draw_requests(settings.mix, count, settings.seed, settings.cached_share), rate)
    outcome = simulate_requests(requests, deployment, settings.link, settings.targets)
    return serving_report(outcome, deployment, settings.targets)


def _goodput(deployment: Deployment, settings: ComparisonSettings) -> float:
    """The highest rate of arrivals, in requests a second, at which enough requests are in time (DistServe, Zhong et al.
    2024, section 1); 0.0 where no rate is low enough.

    The share in time doesn't fall with every higher rate, so this is such a rate within `RATE_TOLERANCE`.
    """

    def keeps_targets(rate: float) -> bool:
        return _simulate_rate(deployment, settings, rate).in_time_share >= settings.in_time_share

    low, high = 0.0, 1.0
    while keeps_targets(high):
        low, high = high, 2 * high
    if not low:
        low = high / 2
        while not keeps_targets(low):
            if low < MIN_RATE:
                return 0.0
            low, high = low / 2, low
    while high / low > 1 + RATE_TOLERANCE:
        middle = sqrt(low * high)
        low, high = (middle, high) if keeps_targets(middle) else (low, middle)
    return low
