"""A worker's metrics for monitoring: its state, and its counters since it began to serve the loaded model. Scheduling
doesn't use them.

Times are counted in fixed buckets, so that histograms of many workers can be summed. The metrics of a worker are a few
kilobytes, whatever its load.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from schemas.experiments import MAX_ARMS, ExperimentName, SliceCounts
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.stored import Count, StoredReport

LATENCY_BOUNDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5,
    1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Inclusive upper bounds of the buckets, seconds; the last bucket has none. The same as the engine's
(`engine.scheduler.latency.BOUNDS`)."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Signed = Annotated[float, Field(allow_inf_nan=False)]


class HistogramSample(StoredReport):
    """A histogram of durations.

    Attributes:
        counts: by bucket; trailing zeros are omitted.
        seconds: sum of all samples.
    """

    counts: Annotated[tuple[Count, ...], Field(max_length=len(LATENCY_BOUNDS) + 1)] = ()
    seconds: Amount = 0.0

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(self.counts)


class TierMetrics(StoredReport):
    """One tier's requests at one worker: rows of jobs (without their copies), and interactive requests.

    Attributes:
        running, waiting: current numbers in the engine's batch, and queued for it.
        answered, failed: numbers of ended requests.
        usage: tokens of ended requests.
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
        prompt: computed prompt tokens.  cached: prompt tokens from the prefix cache.  generated: answer tokens.
    """

    prompt: Amount = 0.0
    cached: Amount = 0.0
    generated: Amount = 0.0


class SloWeights(StoredReport):
    """A number for each term of the objective that the SLO controller minimizes."""

    ttft: Amount = 0.0
    itl: Amount = 0.0
    utilisation: Amount = 0.0
    drops: Amount = 0.0


class SloMetrics(StoredReport):
    """How well the SLOs of interactive requests are met.

    Attributes:
        weights, terms: w1 to w4 of the objective, and its current terms: TTFT and ITL as multiples of their SLOs, the
            share of steps with throttled batch work, the share of requests that timed out.
        others: of the tokens in steps with such requests, the share of batch work.
        beside_streams, beside_prompts: batch tokens allowed in a step with interactive answers, or prompts.
        late_first_tokens, late_tokens, drops: tokens that missed their SLO, and requests that timed out.
    """

    weights: SloWeights
    terms: SloWeights
    others: Annotated[float, Field(ge=0, le=1)] = 0.0
    beside_streams: Count = 0
    beside_prompts: Count = 0
    late_first_tokens: Count = 0
    late_tokens: Count = 0
    drops: Count = 0

    @property
    def objective(self) -> float:
        """The weighted sum of the terms."""
        by, now = self.weights, self.terms
        return by.ttft * now.ttft + by.itl * now.itl + by.utilisation * now.utilisation + by.drops * now.drops


class ExperimentMetrics(StoredReport):
    """A worker's part in an open experiment with the weights of the objective.

    Attributes:
        name: the experiment's.  arm: whose weights the worker has now.
        arms: the counts of its measured slices, by arm.
    """

    name: ExperimentName
    arm: ExperimentName
    arms: Annotated[dict[ExperimentName, SliceCounts], Field(max_length=MAX_ARMS)]


class SpeculationMetrics(StoredReport):
    """The effect of speculative decoding.

    Attributes:
        drafted, accepted: numbers of draft tokens, and of accepted ones.
        gained: estimated tokens beyond those that the same time would have produced without drafts; negative where
            drafts cost more than they gain.  seconds: of the steps that it is estimated over.
    """

    drafted: Count = 0
    accepted: Count = 0
    gained: Signed = 0.0
    seconds: Amount = 0.0


class CacheTierMetrics(StoredReport):
    """A second tier of a prefix cache.

    Attributes:
        hits: blocks loaded.  rejected: blocks that were damaged or not what their name says, and so not used.
        bytes_read, bytes_written: of the blocks loaded and stored.
        is_on: false after its folder could not be used; true of host memory.
    """

    hits: Count = 0
    rejected: Count = 0
    bytes_read: Count = 0
    bytes_written: Count = 0
    is_on: bool = True


class HandoverMetrics(StoredReport):
    """Requests that prefill workers handed over to decode workers, with the KV blocks of their prompts.

    Attributes:
        role: the worker's.  block_tokens, token_bytes: tokens of a KV block, and bytes of a token's keys and values.
        step_tokens: most tokens of a step.
        offered_requests, fetched_requests: handed over by this worker, and to it with blocks, sent or held.
        stayed_requests: that this worker completed itself, because that is faster, or no decode worker lives.
        refused_requests: that it completed itself, because there was no memory for their blocks.
        sent_bytes, received_bytes: of whole transfers, and of verified blocks.
        expired_offers: that no worker fetched in time.  broken_transfers: that ended early at this worker.
        held_bytes: of blocks that were not sent to this worker, because its prefix cache held them.
        used_bytes: of the received ones, those that requests have loaded.
        fetch_seconds: sum over all fetches.
    """

    role: Literal["prefill", "decode"]
    block_tokens: Count = 1
    token_bytes: Count = 0
    step_tokens: Count = 1
    offered_requests: Count = 0
    fetched_requests: Count = 0
    stayed_requests: Count = 0
    refused_requests: Count = 0
    sent_bytes: Count = 0
    received_bytes: Count = 0
    held_bytes: Count = 0
    used_bytes: Count = 0
    expired_offers: Count = 0
    broken_transfers: Count = 0
    fetch_seconds: Amount = 0.0


THROTTLE_REASONS: Final = (
    "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)  # fmt: skip
"""Why a GPU's clocks are lowered, in nvidia-smi's words (clocks_event_reasons), without idleness and chosen clocks."""


class GpuMetrics(StoredReport):
    """One GPU of a worker, or its MIG instance of one. None: the driver doesn't report it.

    Attributes:
        uuid: as nvidia-smi prints it, "GPU-…" or "MIG-…".
        device: of the GPU: "nvidia0" is /dev/nvidia0; empty: unknown.
        memory_bytes, memory_used_bytes: of the GPU or the instance, in total and used by all processes and the driver.
        utilization: share of the last second or less in which a kernel ran; None for an instance.
        power_watts, power_limit_watts: drawn, and enforced; None for an instance, because they are the whole GPU's.
        temperature_celsius, sm_clock_hertz: of the GPU.
        throttled: of `THROTTLE_REASONS`, those that lower its clocks now.
    """

    uuid: Annotated[str, Field(min_length=1)]
    device: str = ""
    memory_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    utilization: Annotated[float, Field(ge=0, le=1)] | None = None
    power_watts: Amount | None = None
    power_limit_watts: Amount | None = None
    temperature_celsius: Signed | None = None
    sm_clock_hertz: Count | None = None
    throttled: tuple[str, ...] | None = None


class PolicyMetrics(StoredReport):
    """A content policy's verdicts on prompts and answers.

    Attributes:
        texts: judged ones by action: "pass", or `schemas.requests.policy_report.PolicyAction`.
        failures: texts that it could not judge.
        prompt_tokens, completion_tokens: of the guard model that judges them.
    """

    texts: dict[str, Count] = Field(default_factory=dict)
    failures: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class AdapterMetrics(StoredReport):
    """An adapter of the loaded model.

    Attributes:
        answered, failed: ended requests and rows.  usage: tokens of the answered ones.
        weights_bytes: of its weights as they are stored.
    """

    answered: Count = 0
    failed: Count = 0
    usage: Usage = Usage()
    weights_bytes: Count = 0


class WorkerMetrics(StoredReport):
    """The metrics of one worker, in tokens unless stated otherwise.

    Attributes:
        model: its name.
        seconds: since the worker began to serve it.
        tiers: those with any requests.
        rates: by kind.
        computed, prompt, generated: positions computed, those of prompts among them, and tokens sampled.
        recomputed: of the computed ones, those that had been computed before a preemption.
        prefix_queried, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
        steps: durations of steps.  step_rows: sum of their rows.
        preemptions: preempted rows.
        kv_blocks, kv_blocks_used: of the KV cache; 0 where the model has none.
        expert_load, rank_load: rows of a mixture's busiest experts, and of the busiest ranks that hold whole experts,
            over those of the mean one, in the last seconds; None: there were none, or they are not counted.
        lane_open, lane_waiting: interactive requests: in the engine, and accepted but not in it yet.
        lane_stolen: interactive requests that it took and that were addressed to other workers.
        pace: None: there is no SLO.  experiment: None: the worker takes part in none.
        speculation: None: nothing was drafted.
        cache_tier, host_tier: the second tiers of the prefix cache on a disk, and in host memory; None: there is none.
        handover: None: the worker neither hands requests over nor takes them over.
        policies: the content policies, by name.
        adapters: those that requests have named, by name.
        gpus: those that compute the model, in the order of its ranks, without those that can't be read.
        store_outage: why the store is unavailable, so that the worker waits for it; None: it is available.
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
    expert_load: Amount | None = None
    rank_load: Amount | None = None
    lane_open: Count = 0
    lane_waiting: Count = 0
    lane_stolen: Count = 0
    pace: SloMetrics | None = None
    experiment: ExperimentMetrics | None = None
    speculation: SpeculationMetrics | None = None
    cache_tier: CacheTierMetrics | None = None
    host_tier: CacheTierMetrics | None = None
    handover: HandoverMetrics | None = None
    policies: dict[str, PolicyMetrics] = Field(default_factory=dict)
    adapters: dict[str, AdapterMetrics] = Field(default_factory=dict)
    gpus: tuple[GpuMetrics, ...] = ()
    store_outage: str | None = None
