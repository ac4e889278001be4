"""Where an interactive request is computed: its prompt on a prefill worker and its answer on a decode worker, or the
whole of it on one worker. A pure function of the request's size and the pools' load.

Prefill is bound by arithmetic and decode by memory bandwidth, so a prompt that is computed beside running rows delays
them (DistServe, Zhong et al. 2024, section 2.3). Splitting avoids that and costs a transfer of keys and values. Three
placements are predicted: time to first token, as queue plus computing (Mooncake, Qin et al. 2024, algorithm 1); mean
time between the answer's tokens, the transfer included; and the delay of other requests' tokens. A placement that keeps
the latency targets comes before one that doesn't; among several the smallest sum of delays decides, and where there is
none the smallest lateness, so that

- a short prompt stays on the decode worker: until a step computes as long as it reads the weights, more tokens in it
  cost nothing;
- a long prompt goes to the prefill workers, until so many prompts wait there that the decode workers are sooner, as in
  Splitwise's mixed pool (Patel et al. 2024, section IV-A);
- an answer of one token ends where its prompt was computed, and so do answers that a slow link or full KV caches would
  keep from the decode workers for longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

BYTES_PER_TOKEN: Final = 4.0
"""Bytes of a prompt's text for each of its tokens, where no tokenizer is at hand: about English's."""

MIN_CHUNK_TOKENS: Final = 128
"""Prompt tokens that a worker's step computes at least, however late its rows' tokens are (the engine's
`slo_control.MIN_CHUNK_TOKENS`)."""

TTFT_SHARE: Final = 0.8
"""Share of the target that a predicted time to first token may take: predictions are means."""


class Placement(StrEnum):
    """Where a request is computed."""

    SPLIT = "split"
    WHOLE_ON_DECODE = "whole_on_decode"
    WHOLE_ON_PREFILL = "whole_on_prefill"


@dataclass(frozen=True, slots=True)
class RequestSize:
    """A request.

    Attributes:
        prompt_tokens: of the whole prompt, at least 1 (`estimate_prompt_tokens` where only bytes are known).
        cached_tokens: of them, the ones in the prefix cache of the worker that would compute it.
        answer_tokens: expected length of the answer, at least 1; at most what the request allows.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.answer_tokens < 1 or not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ValueError(
                f"a prompt of {self.prompt_tokens} tokens, {self.cached_tokens} cached, and an answer of "
                f"{self.answer_tokens}: prompt and answer have at least one token, and the last one is never cached"
            )

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that must be computed; at least 1."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The prefill workers.

    Attributes:
        workers: live ones; 0: none, so no request is split.
        waiting_tokens: prompt tokens that wait for all of them together, or are being computed.
        tokens_per_second: prompt tokens that one worker computes.
        min_step_seconds: duration of a step of few tokens, which reads the weights.
        row_step_seconds: between two tokens of a row that decodes there while prompts wait.
    """

    workers: int
    waiting_tokens: float
    tokens_per_second: float
    min_step_seconds: float
    row_step_seconds: float


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The decode workers.

    Attributes:
        workers: live ones; 0: none, so every request stays whole on a prefill worker.
        running_rows: that decode now, at all of them together.
        waiting_rows: whose prompt was computed, and that wait for room or for their transfer.
        waiting_tokens: prompt tokens of whole requests that wait there or are being computed.
        kv_tokens, kv_tokens_used: tokens for which the KV caches of all together have room, and that are used.
        answer_tokens: mean length of their answers.
        step_seconds: duration of a decode step without prompts.
        tokens_per_second: prompt tokens that one worker computes.
        step_tokens: the most prompt tokens in a step.
        free_step_tokens: tokens that a step computes while it reads the weights, rows included (the roofline's ridge).
    """

    workers: int
    running_rows: int
    waiting_rows: int
    waiting_tokens: float
    kv_tokens: int
    kv_tokens_used: int
    answer_tokens: float
    step_seconds: float
    tokens_per_second: float
    step_tokens: int
    free_step_tokens: float


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The way of keys and values from a prefill worker to a decode worker.

    Attributes:
        kv_bytes_per_token: of all layers.
        bytes_per_second: of the link.  waiting_bytes: of transfers that are ahead on it.
        latency_seconds: what a handover takes beside its bytes: the lane, and the first block's round trip.
    """

    kv_bytes_per_token: float
    bytes_per_second: float
    latency_seconds: float
    waiting_bytes: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Seconds from the first token to the arrival of the keys and values of so many tokens."""
        return self.latency_seconds + (self.waiting_bytes + tokens * self.kv_bytes_per_token) / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What callers are promised: seconds to the first token, and the mean seconds between two later ones."""

    ttft_seconds: float = 1.0
    itl_seconds: float = 0.05


@dataclass(frozen=True, slots=True)
class PlacementForecast:
    """The predicted effect of a placement, in seconds.

    Attributes:
        ttft_seconds: from now to the first token.
        itl_seconds: mean between two tokens of the answer.
        others_itl_seconds: between two tokens of the rows that decode beside the prompt, while it is computed.
        delay_seconds: the first token, what the answer takes longer than on an undisturbed decode worker, and what the
            tokens of all other rows are delayed by, added up.
    """

    placement: Placement
    ttft_seconds: float
    itl_seconds: float
    others_itl_seconds: float
    delay_seconds: float

    def lateness(self, targets: LatencyTargets) -> float:
        """The largest of the times as a multiple of its target, this request's and those of the rows beside it."""
        return max(
            self.ttft_seconds / (TTFT_SHARE * targets.ttft_seconds),
            self.itl_seconds / targets.itl_seconds,
            self.others_itl_seconds / targets.itl_seconds,
        )

    def is_in_time(self, targets: LatencyTargets) -> bool:
        """Whether all targets are kept."""
        return self.lateness(targets) <= 1

    def rank(self, targets: LatencyTargets) -> tuple[float, float]:
        """The smaller, the better. Late placements rank by their lateness, not by delays: delays of rows that are in
        time all the same would let prompts wait at the prefill workers for ever longer."""
        return max(1.0, self.lateness(targets)), self.delay_seconds


def estimate_prompt_tokens(num_bytes: int, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
    """Estimate a prompt's tokens from its text's bytes in UTF-8; at least 1."""
    return max(1, round(num_bytes / bytes_per_token))


def place(
    request: RequestSize,
    prefill: PrefillLoad,
    decode: DecodeLoad,
    transfer: TransferCost,
    targets: LatencyTargets,
) -> PlacementForecast:
    """Return the best placement. Raises `ValueError` when there is neither a prefill nor a decode worker."""
    forecasts = forecast(request, prefill, decode, transfer, targets)
    if not forecasts:
        raise ValueError("there is no worker to place a request on")
    return min(forecasts, key=lambda one: one.rank(targets))


def forecast(
    request: RequestSize,
    prefill: PrefillLoad,
    decode: DecodeLoad,
    transfer: TransferCost,
    targets: LatencyTargets,
) -> list[PlacementForecast]:
    """Predict all placements that the live workers allow, the one that needs no transfer first."""
    found = []
    if decode.workers:
        found.append(_whole_on_decode(request, decode, targets))
    if prefill.workers:
        found.append(_whole_on_prefill(request, prefill, decode))
    if prefill.workers and decode.workers and request.answer_tokens > 1:
        found.append(_split(request, prefill, decode, transfer))
    return found


def _split(request: RequestSize, prefill: PrefillLoad, decode: DecodeLoad, transfer: TransferCost) -> PlacementForecast:
    ttft = _prefill_seconds(request, prefill)
    handover = transfer.seconds(request.prompt_tokens) + _room_seconds(request, decode)
    gaps = request.answer_tokens - 1
    itl = decode.step_seconds + handover / gaps
    return PlacementForecast(Placement.SPLIT, ttft, itl, decode.step_seconds, ttft + handover)


def _whole_on_prefill(request: RequestSize, prefill: PrefillLoad, decode: DecodeLoad) -> PlacementForecast:
    ttft = _prefill_seconds(request, prefill)
    gaps = request.answer_tokens - 1
    itl = prefill.row_step_seconds if gaps else 0.0
    slower = max(0.0, itl - decode.step_seconds) if decode.workers else 0.0
    return PlacementForecast(Placement.WHOLE_ON_PREFILL, ttft, itl, 0.0, ttft + gaps * slower)


def _whole_on_decode(request: RequestSize, decode: DecodeLoad, targets: LatencyTargets) -> PlacementForecast:
    rows = (decode.running_rows + decode.waiting_rows) / decode.workers
    free = max(0.0, decode.free_step_tokens - rows)
    pending = decode.waiting_tokens / decode.workers + request.computed_tokens
    chunk = min(pending, _chunk_tokens(decode, free, targets) if rows else decode.step_tokens)
    step = decode.step_seconds + max(0.0, chunk - free) / decode.tokens_per_second
    ttft = _room_seconds(request, decode) + max(1.0, pending / chunk) * step
    # What this prompt adds to the steps; the prompts before it add theirs in any case.
    own = min(chunk, request.computed_tokens)
    delay = rows * request.computed_tokens / own * max(0.0, own - free) / decode.tokens_per_second
    itl = decode.step_seconds if request.answer_tokens > 1 else 0.0
    return PlacementForecast(Placement.WHOLE_ON_DECODE, ttft, itl, step if rows else 0.0, ttft + delay)


def _chunk_tokens(decode: DecodeLoad, free: float, targets: LatencyTargets) -> float:
    """Prompt tokens of a step beside rows: the engine's SLO control computes as many as keep the rows in time."""
    in_time = free + max(0.0, targets.itl_seconds - decode.step_seconds) * decode.tokens_per_second
    return max(MIN_CHUNK_TOKENS, min(decode.step_tokens, in_time))


def _prefill_seconds(request: RequestSize, prefill: PrefillLoad) -> float:
    """Seconds until a prefill worker has computed the prompt."""
    pending = prefill.waiting_tokens / prefill.workers + request.computed_tokens
    return max(prefill.min_step_seconds, pending / prefill.tokens_per_second)


def _room_seconds(request: RequestSize, decode: DecodeLoad) -> float:
    """Seconds until the decode workers' KV caches have room for the request, and for the rows that wait before it: in
    the time of an answer as many tokens are released as are used now."""
    tokens = request.prompt_tokens + request.answer_tokens
    missing = (1 + decode.waiting_rows) * tokens - (decode.kv_tokens - decode.kv_tokens_used)
    if missing <= 0:
        return 0.0
    if not decode.running_rows:
        return inf
    return missing / max(1, decode.kv_tokens_used) * decode.answer_tokens * decode.step_seconds
