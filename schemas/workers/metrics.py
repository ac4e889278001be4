"""What a worker tells of its work, for whoever watches: how it stands, and what it has counted since it began to serve
the model that it has loaded. Nothing is decided by it.

Times are counted in fixed buckets, so those of many workers can be added up. Figures are a few kilobytes, whatever the
worker does.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.stored import Count, StoredReport

LATENCY_BOUNDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5,
    1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Upper ends of the buckets, seconds, each included; the last bucket has none. As an engine counts
(`engine.scheduler.latency.BOUNDS`)."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Signed = Annotated[float, Field(allow_inf_nan=False)]


class HistogramSample(StoredReport):
    """Samples of a time.

    Attributes:
        counts: by bucket; zeros at the end are left out.
        seconds: of all samples together.
    """

    counts: Annotated[tuple[Count, ...], Field(max_length=len(LATENCY_BOUNDS) + 1)] = ()
    seconds: Amount = 0.0

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(self.counts)


class TierMetrics(StoredReport):
    """One tier's requests at one worker: rows of jobs, and requests whose callers wait. A row's copies are none.

    Attributes:
        running, waiting: in the engine's batch, and here without a place in it; now.
        answered, failed: that have ended.
        usage: tokens of those that have ended.
        ttft: from a request's arrival in the engine to its first token.  itl: between two tokens of an answer.
        whole: from a request's arrival in the engine to its end.
    """

    running: Count = 0
    waiting: Count = 0
    answered: Count = 0
    failed: Count = 0
    usage: Usage = Usage()
    ttft: HistogramSample = HistogramSample()
    itl: HistogramSample = HistogramSample()
    whole: HistogramSample = HistogramSample()


class TokenRates(StoredReport):
    """Tokens a second over the last seconds, busy or not.

    Attributes:
        prompt: of prompts, computed.  cached: of prompts, found in the prefix cache instead.  generated: of answers.
    """

    prompt: Amount = 0.0
    cached: Amount = 0.0
    generated: Amount = 0.0


class PaceWeights(StoredReport):
    """A number for each term of the objective that pacing lowers."""

    ttft: Amount = 0.0
    itl: Amount = 0.0
    utilisation: Amount = 0.0
    drops: Amount = 0.0


class PaceMetrics(StoredReport):
    """How well the promises to callers who wait are kept.

    Attributes:
        weights, terms: w1 to w4 of the objective, and what they weigh now: TTFT and ITL as multiples of what is
            promised, the share of steps that work was held back from, the share of requests that ran out of time.
        others: of the tokens in steps with such requests, the share of other work.
        beside_streams, beside_prompts: tokens of a step that are allowed beside answers, and beside prompts.
        late_first_tokens, late_tokens, drops: that missed their promise, and requests that ran out of time.
    """

    weights: PaceWeights
    terms: PaceWeights
    others: Annotated[float, Field(ge=0, le=1)] = 0.0
    beside_streams: Count = 0
    beside_prompts: Count = 0
    late_first_tokens: Count = 0
    late_tokens: Count = 0
    drops: Count = 0

    @property
    def objective(self) -> float:
        """The sum of the terms, each times its weight."""
        by, now = self.weights, self.terms
        return by.ttft * now.ttft + by.itl * now.itl + by.utilisation * now.utilisation + by.drops * now.drops


class SpeculationMetrics(StoredReport):
    """What guessed tokens bring.

    Attributes:
        drafted, accepted: guesses, and those that were right.
        gained: tokens beyond what the same time would have brought without guesses: an estimate, less than 0 where they
            cost more than they bring.  seconds: of the steps that it is estimated over.
    """

    drafted: Count = 0
    accepted: Count = 0
    gained: Signed = 0.0
    seconds: Amount = 0.0


class WorkerMetrics(StoredReport):
    """One worker; tokens unless said otherwise.

    Attributes:
        model: its name.
        seconds: since it began to serve it.
        tiers: those of which there was anything.
        rates: by kind.
        computed, prompt, generated: positions computed, those of prompts among them, and tokens sampled.
        recomputed: of the computed ones, those that had been computed before, ahead of a preemption.
        prefix_queried, prefix_hits: of prompts, looked up in the prefix cache, and found there.
        steps: their times.  step_rows: rows in them, together.
        preemptions: rows put back.
        kv_blocks, kv_blocks_used: of the KV cache; none where the model has none.
        lane_open, lane_waiting: requests whose callers wait: in the engine, and taken but not in it yet.
        pace: None: nothing is promised.  speculation: None: nothing was guessed.
        store_outage: why the store can't be used now, so that the worker waits for it; None: it can.
    """

    model: Annotated[str, Field(min_length=1)]
    seconds: Amount = 0.0
    tiers: dict[Tier, TierMetrics] = Field(default_factory=dict)
    rates: TokenRates = TokenRates()
    computed: Count = 0
    prompt: Count = 0
    generated: Count = 0
    recomputed: Count = 0
    prefix_queried: Count = 0
    prefix_hits: Count = 0
    steps: HistogramSample = HistogramSample()
    step_rows: Count = 0
    preemptions: Count = 0
    kv_blocks: Count = 0
    kv_blocks_used: Count = 0
    lane_open: Count = 0
    lane_waiting: Count = 0
    pace: PaceMetrics | None = None
    speculation: SpeculationMetrics | None = None
    store_outage: str | None = None
