"""Interactive requests of a simulation: arrivals as a Poisson process, lengths from log-normal distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.lane.placement import Placement


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths of one kind of requests, in tokens.

    Attributes:
        share: of all requests.
        prompt_tokens, answer_tokens: medians.
        prompt_sigma, answer_sigma: standard deviations of the lengths' natural logarithms.
        max_prompt_tokens, max_answer_tokens: longer ones are cut to these.
    """

    share: float
    prompt_tokens: float
    answer_tokens: float
    prompt_sigma: float = 0.2
    answer_sigma: float = 0.7
    max_prompt_tokens: int = 2**20
    max_answer_tokens: int = 8_192


REQUEST_MIXES: Final[Mapping[str, tuple[LengthDistribution, ...]]] = {
    "chat": (LengthDistribution(1.0, 400.0, 200.0, prompt_sigma=0.8),),
    "mixed": (LengthDistribution(1.0, 107.0, 110.0, 0.48, 0.69, 571, 254),),
    "varied": (LengthDistribution(1.0, 487.0, 54.0, 1.37, 1.51, 2_962, 1_000),),
    "8k": (LengthDistribution(1.0, 8_192.0, 200.0),),
    "32k": (LengthDistribution(1.0, 32_768.0, 200.0),),
    "chat+8k": (
        LengthDistribution(0.8, 400.0, 200.0, prompt_sigma=0.8),
        LengthDistribution(0.2, 8_192.0, 200.0),
    ),
    "chat+32k": (
        LengthDistribution(0.95, 400.0, 200.0, prompt_sigma=0.8),
        LengthDistribution(0.05, 32_768.0, 200.0),
    ),
}
"""By name. `mixed` and `varied` have the mean logarithm, deviation and maximum of benchmarks/workloads, at four bytes a
prompt token; the others are assumed."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, and what became of it. Times are seconds since the simulation's begin.

    Attributes:
        number: from 0, in order of arrival.
        prompt_tokens, answer_tokens: at least 1 each.  cached_tokens: of the prompt, never the last one.
        placement: None: not placed yet.
        computed_tokens: of the prompt, the cached ones included.
        first_token_at, ended_at: None: not yet.
        last_token_at: of the answer's latest token.
    """

    number: int
    arrived_at: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    placement: Placement | None = None
    computed_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens for which the KV cache needs room, at most."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return self.prompt_tokens - max(self.computed_tokens, self.cached_tokens)

    @property
    def ttft_seconds(self) -> float:
        """From its arrival to its first token; infinite without one."""
        return math.inf if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def mean_itl_seconds(self) -> float:
        """Mean time between two tokens of its answer (DistServe's TPOT); 0 for one token, infinite before its end."""
        if self.ended_at is None or self.first_token_at is None:
            return math.inf
        return (self.ended_at - self.first_token_at) / max(1, self.answer_tokens - 1)


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """Lengths of a request, and the time since the one before it as a multiple of the mean time."""

    gap: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


def draw_requests(
    mix: Sequence[LengthDistribution], count: int, seed: int, cached_share: float = 0.0
) -> tuple[DrawnRequest, ...]:
    """Draw requests; the same arguments give the same ones, for any rate.

    Args:
        cached_share: of each prompt's tokens, the ones that are in the prefix cache.
    """
    rng = random.Random(f"requests/{seed}")
    weights = [kind.share for kind in mix]
    drawn = []
    for _ in range(count):
        (kind,) = rng.choices(mix, weights)
        prompt = _length(rng, kind.prompt_tokens, kind.prompt_sigma, kind.max_prompt_tokens)
        answer = _length(rng, kind.answer_tokens, kind.answer_sigma, kind.max_answer_tokens)
        drawn.append(DrawnRequest(rng.expovariate(1.0), prompt, min(prompt - 1, int(cached_share * prompt)), answer))
    return tuple(drawn)


def _length(rng: random.Random, median: float, sigma: float, longest: int) -> int:
    return min(max(1, round(median * math.exp(rng.gauss(0.0, sigma)))), longest)


def arrivals(drawn: Sequence[DrawnRequest], requests_per_second: float) -> list[SimulatedRequest]:
    """The requests at this mean rate; at an infinite one all arrive at time 0."""
    found, at = [], 0.0
    for number, one in enumerate(drawn):
        at += one.gap / requests_per_second
        found.append(SimulatedRequest(number, at, one.prompt_tokens, one.cached_tokens, one.answer_tokens))
    return found
