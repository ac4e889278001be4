"""A simulated worker for experiments with the scheduler's weights: the engine's own scheduler and SLO controller, the
worker's own application of arms, and reports in a store, on a machine whose steps only take simulated time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ScheduleConfig, SloConfig
from engine.engine import Engine
from engine.models.base import ModelSpec
from engine.request import Request, SamplingParams
from engine.runner.null_runner import NullRunner
from pipeline.experiments.registry import ExperimentRegistry
from workers.experiments import POLL_SECONDS, ExperimentSideWork
from workers.side_work import NoSideWork

if TYPE_CHECKING:
    from engine.plan import StepOutput, StepPlan
    from schemas.experiments import Experiment

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Of simulated experiments; orders of arms follow from it."""

MODEL: Final = "simulated"

_SPEC: Final = ModelSpec("none", 1, 1, 1, 8, 8, 1_000, 16_384, (None,), (2,), 0, torch.float32)
_BLOCKS: Final = 32_000


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """A machine and its work.

    Attributes:
        step_seconds, token_seconds: a step's duration: a fixed part, and a part for each of its tokens.
        rows, budget: most sequences of a batch, and most tokens of a step.
        requests_per_second: mean rate of interactive requests.
        rate_spread, rate_seconds: standard deviation of the rate's logarithm, and the time after which its correlation
            with itself has fallen to 1/e.
        prompt_tokens, answer_tokens: means of interactive requests, whose lengths are distributed exponentially.
        batch_prompt_tokens, batch_answer_tokens: of rows of jobs, of which there are always enough to fill the batch.
        timeout_seconds: after which an interactive request is dropped.
    """

    step_seconds: float = 0.005
    token_seconds: float = 0.001
    rows: int = 96
    budget: int = 512
    requests_per_second: float = 1.5
    rate_spread: float = 0.5
    rate_seconds: float = 120.0
    prompt_tokens: int = 40
    answer_tokens: int = 60
    batch_prompt_tokens: int = 60
    batch_answer_tokens: int = 200
    timeout_seconds: float = 30.0


@dataclass(slots=True)
class _Clock:
    """A clock that the runner advances."""

    start: datetime
    seconds: float = 0.0

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(slots=True)
class _TimedRunner:
    """The engine's runner: steps take the machine's time."""

    null: NullRunner
    clock: _Clock
    machine: SimulatedMachine

    def execute(self, plan: StepPlan) -> StepOutput:
        self.clock.seconds += self.machine.step_seconds + self.machine.token_seconds * plan.num_tokens
        return self.null.execute(plan)


@dataclass(slots=True)
class _Arrivals:
    """Times of interactive requests: a Poisson process whose rate's logarithm is a stationary process of first order
    (Ornstein and Uhlenbeck's), so that load comes in waves."""

    machine: SimulatedMachine
    draw: random.Random
    log_rate: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.log_rate = self.draw.gauss(0, self.machine.rate_spread)

    def next(self) -> float:
        """Seconds of the next request."""
        mean, spread = self.machine.requests_per_second, self.machine.rate_spread
        wait = self.draw.expovariate(mean * math.exp(self.log_rate - spread**2 / 2))
        stays = math.exp(-wait / self.machine.rate_seconds)
        self.log_rate = stays * self.log_rate + self.draw.gauss(0, spread * math.sqrt(1 - stays**2))
        self.at += wait
        return self.at


def simulate_worker(
    experiment: Experiment,
    registry: ExperimentRegistry,
    slo: SloConfig,
    machine: SimulatedMachine | None = None,
    *,
    worker: str = "worker-1",
    seed: int = 0,
    until: datetime | None = None,
) -> None:
    """Simulate one worker from the experiment's start to its end, or to `until`; the experiment is in the registry."""
    machine = machine or SimulatedMachine()
    draw, clock = random.Random(f"{seed} {worker}"), _Clock(experiment.started_at - timedelta(seconds=POLL_SECONDS))
    config = EngineConfig(
        cache=CacheConfig(block_size=16, prefix_caching=False),
        schedule=ScheduleConfig(machine.rows, machine.budget, slo=slo),
    )
    engine = Engine.without_model(
        _SPEC, config, _BLOCKS, clock.monotonic,
        lambda rows, vocab_size: _TimedRunner(NullRunner(rows, vocab_size), clock, machine),
    )  # fmt: skip
    side_work = ExperimentSideWork(NoSideWork(clock), engine, MODEL, clock, registry, worker, worker)
    arrivals, arrived, refresh_at = _Arrivals(machine, draw), 0, 0.0
    due = arrivals.next()
    end = (until or experiment.ends_at) + timedelta(seconds=1)
    while clock.now() < end:
        if clock.seconds >= refresh_at:
            side_work.refresh()
            refresh_at = clock.seconds + POLL_SECONDS
        side_work.poll(admit=True)
        while due <= clock.seconds:
            engine.add(
                _request(
                    f"i{arrived}",
                    draw,
                    machine.prompt_tokens,
                    machine.answer_tokens,
                    0,
                    clock.seconds + machine.timeout_seconds,
                )
            )
            arrived, due = arrived + 1, arrivals.next()
        while engine.num_waiting + engine.num_running < machine.rows + 8:
            arrived += 1
            engine.add(_request(f"b{arrived}", draw, machine.batch_prompt_tokens, machine.batch_answer_tokens, 2, None))
        engine.step()
    side_work.refresh()


def _request(
    name: str, draw: random.Random, prompt: int, answer: int, priority: int, deadline: float | None
) -> Request:
    """A request whose lengths have these means."""
    tokens = np.full(min(4_000, 1 + int(draw.expovariate(1 / prompt))), 7, dtype=np.int32)
    length = min(4_000, 1 + int(draw.expovariate(1 / answer)))
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=1)
    return Request(name, tokens, params, priority=priority, deadline=deadline)
