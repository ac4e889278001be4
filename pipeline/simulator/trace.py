"""Traces of job arrivals and spot interruptions over some hours: read from a file, or drawn at random by a seed.

A file has a JSON object a line: jobs {"at", "rows", "prompt_tokens", "output_tokens", "tier", "tenant", "deadline"},
and interruptions of spot machines {"at", "interrupt"}. Times are seconds, `at` from the beginning, `deadline` after
`at`. For several regions a job also has "home", "regions" and "input_bytes".
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.ports import PipelineError
from pipeline.simulator.worker_model import WorkerModel
from schemas.jobs.job import Tier

Pattern = Literal["bursts", "ramp", "daynight", "spot-storm"]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class BadTrace(PipelineError):
    """Raised when a file isn't a valid trace."""


class TracedJob(BaseModel):
    """A job of equal rows: `prompt_tokens` and `output_tokens` are of each row.

    Attributes:
        home: region where its input lies; None: the first one that it may run in.
        regions: that it may run in; None: all that its tenant may use.
        input_bytes: of its input; None: four for each token of its prompts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: Amount
    rows: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 300.0
    output_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 200.0
    tier: Literal[Tier.STANDARD, Tier.BULK] = Tier.STANDARD
    tenant: str = "default"
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    home: Annotated[str, Field(min_length=1)] | None = None
    regions: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    input_bytes: Amount | None = None


class SpotInterruption(BaseModel):
    """An interruption of this share of the live workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: Amount
    interrupt: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace. Both lists are in order of time."""

    name: str
    jobs: tuple[TracedJob, ...]
    interruptions: tuple[SpotInterruption, ...] = ()

    @property
    def requests(self) -> int:
        return sum(job.rows for job in self.jobs)

    def work(self, worker: WorkerModel) -> float:
        """Seconds that one worker with an always full batch needs."""
        return sum(worker.seconds(job.rows, job.prompt_tokens, job.output_tokens) for job in self.jobs)


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises `BadTrace`, with the line number."""
    line_of = TypeAdapter[TracedJob | SpotInterruption](TracedJob | SpotInterruption)
    jobs: list[TracedJob] = []
    interruptions: list[SpotInterruption] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: can't be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            kind = SpotInterruption if "interrupt" in json.loads(line) else TracedJob
            found = kind.model_validate_json(line)
        except (ValidationError, ValueError, TypeError) as error:
            detail = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
            reason = str(error) if detail is None else f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
            raise BadTrace(f"{path}:{number}: is neither a job nor an interruption: {reason}") from error
        line_of.validate_python(found)
        if isinstance(found, TracedJob):
            jobs.append(found)
        else:
            interruptions.append(found)
    if not jobs:
        raise BadTrace(f'{path}: has no job; give a line such as {{"at": 0, "rows": 1000, "deadline": 3600}}')
    return Trace(path.name, _in_order(jobs), tuple(sorted(interruptions, key=lambda one: one.at)))


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How a trace is drawn.

    Attributes:
        requests: in all.  hours: of arrivals.  jobs: that they come in; None: a number that suits the hours.
        deadlines: seconds after arrival that jobs are due, the shortest and the longest.
        bulk: share of the requests without a deadline.
    """

    requests: int
    hours: float = 24.0
    jobs: int | None = None
    prompt_tokens: float = 300.0
    output_tokens: float = 200.0
    deadlines: tuple[float, float] = (3_600.0, 21_600.0)
    bulk: float = 0.2
    tenants: int = 4


def draw_trace(pattern: Pattern, drawn: TraceSettings, seed: int) -> Trace:
    """Draw a random trace; the same seed gives the same trace."""
    rng = random.Random(f"{pattern}/{seed}")
    count = min(drawn.requests, drawn.jobs or max(8, round(drawn.hours * 12)))
    moments = _moments(_INTENSITY[pattern](rng), count, rng, drawn.hours * 3_600.0)
    weights = [rng.lognormvariate(0.0, 0.5) for _ in moments]
    total = sum(weights)
    jobs = []
    for at, weight in zip(moments, weights, strict=True):
        low, high = drawn.deadlines
        deadline = math.exp(rng.uniform(math.log(low), math.log(high)))
        bulk = rng.random() < drawn.bulk
        jobs.append(
            TracedJob(
                at=at,
                rows=max(1, round(drawn.requests * weight / total)),
                prompt_tokens=drawn.prompt_tokens * rng.uniform(0.5, 1.5),
                output_tokens=drawn.output_tokens * rng.uniform(0.5, 1.5),
                tier=Tier.BULK if bulk else Tier.STANDARD,
                tenant=f"tenant-{rng.randrange(drawn.tenants)}",
                deadline=None if bulk else deadline,
            )
        )
    storms = _storms(rng, drawn.hours) if pattern == "spot-storm" else ()
    return Trace(f"{pattern}, seed {seed}", _in_order(jobs), storms)


Intensity = Callable[[float], float]
"""The arrival rate, of any scale, as a function of time from 0 to 1 of the whole duration."""


def _bursts(rng: random.Random) -> Intensity:
    """Nearly all jobs arrive in a few short bursts."""
    peaks = [(rng.random(), rng.uniform(0.004, 0.012)) for _ in range(6)]
    return lambda share: 0.02 + sum(math.exp(-(((share - at) / width) ** 2)) for at, width in peaks)


def _ramp(_rng: random.Random) -> Intensity:
    """The rate rises from a tenth to the full rate, and stays there."""
    return lambda share: 0.1 + 0.9 * min(1.0, share / 0.8)


def _daynight(_rng: random.Random) -> Intensity:
    """The rate at night is a tenth of the afternoon's."""
    return lambda share: 0.55 - 0.45 * math.cos(2 * math.pi * share)


_INTENSITY: Final[dict[str, Callable[[random.Random], Intensity]]] = {
    "bursts": _bursts,
    "ramp": _ramp,
    "daynight": _daynight,
    "spot-storm": lambda _rng: lambda _share: 1.0,
}


def _moments(intensity: Intensity, count: int, rng: random.Random, seconds: float) -> list[float]:
    """So many moments, drawn from the intensity by its sum over a thousand steps."""
    steps = 1_000
    weights = [max(0.0, intensity((step + 0.5) / steps)) for step in range(steps)]
    chosen = rng.choices(range(steps), weights, k=count)
    return sorted((step + rng.random()) / steps * seconds for step in chosen)


def _storms(rng: random.Random, hours: float) -> tuple[SpotInterruption, ...]:
    """Two storms a day, in each of which machines are taken away for half an hour; and single ones all the time."""
    found = []
    for _ in range(max(1, round(hours / 12))):
        begin = rng.uniform(0.1, 0.9) * hours * 3_600
        found += [
            SpotInterruption(at=begin + minute * 60, interrupt=rng.uniform(0.1, 0.4)) for minute in range(0, 30, 6)
        ]
    found += [SpotInterruption(at=rng.random() * hours * 3_600, interrupt=0.05) for _ in range(round(hours))]
    return tuple(sorted(found, key=lambda one: one.at))


def _in_order(jobs: list[TracedJob]) -> tuple[TracedJob, ...]:
    return tuple(sorted(jobs, key=lambda job: job.at))
