"""Requests and completions of the engine: token ids, never text.

Text rules that need a tokenizer (stop strings, grammars) are small per-choice objects that the factories of `Request`
create; the engine only calls them for the rows that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestRefused
from engine.sampling.token_bans import TokenBans


class FinishReason(StrEnum):
    """Why a choice ended. `STOP` and `LENGTH` are answers; the others are not."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


Pooling = Literal["cls", "last", "max", "mean", "mean_sqrt_len", "weightedmean", "classify"]
"""How the hidden states of a prompt become one vector, as sentence-transformers defines the modes: the first position's
or the last one's; the largest of each number; the mean, also times the root of the length, or weighted by the
position, counted from 1. "classify": by the model's own head for labels (logits); for encoders only."""


class TokenWatcher(Protocol):
    """Receives each sampled token of one choice and may end it (implements stop strings)."""

    def push(self, token_id: int) -> bool:
        """Take the next sampled token; True ends the choice with finish reason "stop"."""
        ...


class TokenMask(Protocol):
    """Restricts the next tokens of one choice (implements grammars).

    A mask with an attribute `filler`, a `MaskFiller`, is filled in one call with the others that have the same one.
    """

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """Write the allowed tokens into `bitmask` [ceil(vocab / 32)], bit i of word w = token 32 w + i."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by the sampled token."""
        ...


class MaskFiller(Protocol):
    """Fills the masks of a step's choices in one call, on several threads for example."""

    def fill(self, masks: Sequence[TokenMask], bitmasks: NDArray[np.int32]) -> Mapping[int, Exception]:
        """Write the tokens that each mask allows into its row of `bitmasks` [masks, ceil(vocab / 32)], contiguous and
        zeroed. Returns errors by the mask's index: that choice fails, and no other."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The order of the chain is: mask, allowed_token_ids, bad_words, logit_bias, penalties, (greedy: argmax), temperature,
    top_k, top_p, min_p, draw.
    Randomness is counter-based: the draw for a position depends on (`seed`, choice, position) alone, so other rows of
    the batch, chunking, preemption or another worker change nothing.

    Attributes:
        max_tokens: maximum number of tokens to generate; 0 scores the prompt only.
        n: choices for one prompt.
        temperature: 0 is greedy.  top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
        repetition_penalty: over prompt and output, 1 is off (Keskar et al. 2019, CTRL, section 4.1).
        frequency_penalty, presence_penalty: over output, 0 is off (OpenAI's definition).
        logit_bias: token id -> added to its logit.
        allowed_token_ids: only these are chosen, end tokens included; None: all. Where a mask, or the end tokens that
            min_tokens holds back, leave none of them, the choice fails.
        bad_words: token sequences that the output never contains: the last token is not chosen behind the others.
        stop_token_ids: end the choice; the stop token is not part of the output.
        ignore_eos: the model's own end tokens do not end the choice (`stop_token_ids` still do).
        min_tokens: end tokens are masked until this number was generated.
        logprobs: None is off; k >= 0 returns the chosen token's log-probability and the k largest, of the
            model's own distribution (before the chain).
        prompt_logprobs: the same for the prompt's tokens, from `prompt_logprobs_start` on.
        prompt_logprobs_start: the index of the first prompt token that has log-probabilities. What precedes the token
            before it may come from the prefix cache; 0 turns its reads off for this request.
        prompt_targets: with max_tokens 0, log-probabilities of any tokens behind any part of the prompt: (index, token
            id), the token taking the place of the prompt's at that index (1 or more), or following the last one's. What
            precedes the token before the first index may come from the prefix cache.
        bans: made from `allowed_token_ids` and `bad_words`; None: there are none. `replace` keeps it while both stay
            the same objects, so parameters that are made from others share it.
    """

    max_tokens: int = 16
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    prompt_targets: tuple[tuple[int, int], ...] = ()
    bans: TokenBans | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        def refuse(name: str, value: object, rule: str) -> None:
            raise RequestRefused(f"{name} is {value!r}, but must be {rule}")

        if self.max_tokens < 0:
            refuse("max_tokens", self.max_tokens, "0 or more")
        if self.n < 1:
            refuse("n", self.n, "1 or more")
        if not 0 <= self.temperature < float("inf"):
            refuse("temperature", self.temperature, "0 or more, and finite")
        if self.top_k < 0:
            refuse("top_k", self.top_k, "0 (off) or more")
        if not 0 < self.top_p <= 1:
            refuse("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", self.min_p, "from 0 to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            refuse("repetition_penalty", self.repetition_penalty, "above 0, and finite")
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None and count < 0:
                refuse(name, count, "0 or more, or None")
        if self.prompt_logprobs_start < 0:
            refuse("prompt_logprobs_start", self.prompt_logprobs_start, "0 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"from 0 to max_tokens ({self.max_tokens})")
        if self.allowed_token_ids == ():
            refuse("allowed_token_ids", self.allowed_token_ids, "one token id at least, or None")
        if self.prompt_targets and (self.max_tokens or self.prompt_logprobs is not None):
            refuse("prompt_targets", self.prompt_targets, "alone: without prompt_logprobs, and with max_tokens 0")
        if any(index < 1 for index, _ in self.prompt_targets):
            refuse("prompt_targets", self.prompt_targets, "at an index of 1 or more")
        if not all(self.bad_words):
            refuse("bad_words", self.bad_words, "sequences of one token at least")
        allowed, words, bans = self.allowed_token_ids, self.bad_words, self.bans
        if bans is None or bans.allowed_token_ids is not allowed or bans.bad_words is not words:
            has_bans = allowed is not None or bool(words)
            object.__setattr__(self, "bans", TokenBans(allowed, words) if has_bans else None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def scored_from(self) -> int | None:
        """The index of the first prompt token whose log-probability is wanted; None: of none."""
        if self.prompt_targets:
            return min(index for index, _ in self.prompt_targets)
        return None if self.prompt_logprobs is None else self.prompt_logprobs_start

    @property
    def has_long_bad_words(self) -> bool:
        """Whether what is banned depends on the tokens before."""
        return self.bans is not None and self.bans.long_words is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens.

    Attributes:
        chosen: float32 [tokens], of the token at each position (NaN for a prompt's first token, and for those
            before `SamplingParams.prompt_logprobs_start`).
        top_ids, top: int32 and float32 [tokens, k], the k most probable, descending.
    """

    chosen: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]

    def __getitem__(self, tokens: slice) -> TokenLogprobs:
        """Those of some of the tokens."""
        return TokenLogprobs(self.chosen[tokens], self.top_ids[tokens], self.top[tokens])


@dataclass(frozen=True, slots=True)
class PartialChoice:
    """The state of a choice whose request has not ended: returned by `Engine.partial`, accepted by `Request.partial`.

    Attributes:
        index: of the choice.
        token_ids: int32 [tokens], sampled so far, without an end token.
        logprobs: of them, when the request asks for any.
        finish_reason, stop_token_id: how it ended, when it has ended and only its siblings continue.
    """

    index: int
    token_ids: NDArray[np.int32]
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete, score or pool.

    Attributes:
        request_id: chosen by the caller, unique among unfinished requests.
        prompt_token_ids: int32 [prompt_tokens], at least one.
        priority: the class; lower runs first and may preempt higher ones (0 interactive, 1 standard, 2 bulk).
        deadline: on the engine's clock (seconds); past it the request ends with finish reason "timeout".
        expected_tokens: estimate of the answer's length in tokens, for admission; None: estimated from ended answers.
        prefix_group: requests with the same value share a prompt prefix; answer lengths are estimated by group.
        prefix_readers: announced requests that begin with that prefix and will be added after this one: other blocks
            are evicted before the prefix's.
        readers_known: the planner guarantees that all requests that share more of the prompt than `prefix_readers`
            counts are in the queue already. Then blocks that only this request read are reused before any other.
        continues: the prompt begins with that of a request which has just ended, so it precedes the others of its class
            while that prefix is in the cache.
        retain: prefixes of the prompt whose full blocks stay in the prefix cache, each (tokens, seconds): others are
            evicted before, until the seconds from the blocks' last use are over. No request waits for such blocks.
        salt: identifies the owner: separates the prefix-cache entries of different owners; the rows of class 0 are
            shared out by it.
        adapter: name of the adapter that it is computed with (`EngineConfig.lora`); None: the model alone.
        watcher, mask: factories of the per-choice watcher or mask; called with the choice's index.
        pooling: with max_tokens 0, return the prompt's hidden states, pooled.
        pooling_skip: positions at the beginning that a mean excludes.
        dimensions: size that each vector is truncated to; for an `Embedder`.
        token_type_ids: int32 [prompt_tokens]: the number of the text of a pair that each token is from; None: 0. For
            encoders that read them.
        more: further requests that are computed with this one and answered by one completion; only a `GroupEngine`
            accepts them. All have the same `n`: choice c of member m has the index m * n + c in the completion and in
            `partial`. The others' own id, priority, deadline, salt and `partial` are not used.
        partial: choices of an interrupted computation of this request; it continues from there, with the answer that
            it would have had without the interruption (at float32).
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 2
    deadline: float | None = None
    expected_tokens: int | None = None
    prefix_group: int | None = None
    prefix_readers: int = 0
    readers_known: bool = False
    continues: bool = False
    retain: tuple[tuple[int, float], ...] = ()
    salt: bytes = b""
    adapter: str | None = None
    watcher: Callable[[int], TokenWatcher] | None = None
    mask: Callable[[int], TokenMask] | None = None
    pooling: Pooling | None = None
    pooling_skip: int = 0
    dimensions: int | None = None
    token_type_ids: NDArray[np.int32] | None = None
    more: tuple[Request, ...] = ()
    partial: tuple[PartialChoice, ...] = ()

    @property
    def members(self) -> tuple[Request, ...]:
        """This request, which comes first, and those that are computed with it."""
        return (self, *self.more)

    @property
    def num_choices(self) -> int:
        """The choices of all members."""
        return self.params.n * (1 + len(self.more))

    def member_of(self, choice: int) -> Request:
        """The member that a choice belongs to."""
        index = choice // self.params.n
        return self.more[index - 1] if index else self

    @property
    def awaited(self) -> bool:
        """Whether the host needs each of its tokens before the next one can be computed, because a mask, a penalty
        or a bad word depends on it, or needs more of each step than tokens (log-probabilities, pooled states)."""
        params = self.params
        return (
            self.mask is not None
            or self.pooling is not None
            or params.logprobs is not None
            or params.scored_from is not None
            or params.repetition_penalty != 1
            or bool(params.frequency_penalty or params.presence_penalty)
            or params.has_long_bad_words
        )


def check_request(request: Request) -> None:
    """Check a request without a model; raises `RequestRefused`."""
    prompt, params = request.prompt_token_ids, request.params
    max_tokens = params.max_tokens
    if prompt.ndim != 1 or prompt.size == 0 or prompt.dtype != np.int32:
        raise RequestRefused(
            f"request {request.request_id!r}: the prompt is {prompt.dtype} {list(prompt.shape)}, "
            "but must be int32 [tokens] with at least one token"
        )
    if request.pooling is not None and max_tokens:
        raise RequestRefused(
            f"request {request.request_id!r}: pooling {request.pooling!r} goes with max_tokens 0, not {max_tokens}"
        )
    if request.pooling is not None and not 0 <= request.pooling_skip < prompt.size:
        raise RequestRefused(
            f"request {request.request_id!r}: pooling leaves out {request.pooling_skip} positions, but must leave in "
            f"one of {prompt.size}"
        )
    if not all(0 <= tokens <= prompt.size and 0 < seconds < inf for tokens, seconds in request.retain):
        raise RequestRefused(
            f"request {request.request_id!r}: retain is {request.retain}, but must be prefixes of the {prompt.size} "
            "tokens, and seconds above 0"
        )
    if any(index > prompt.size for index, _ in params.prompt_targets):
        raise RequestRefused(f"request {request.request_id!r}: prompt_targets go beyond its {prompt.size} tokens")
    if request.more:
        raise RequestRefused(f"request {request.request_id!r}: has {len(request.more)} more; give it to a GroupEngine")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `token_ids` int32 [tokens] excludes the end token; `stop_token_id` is that token.

    Attributes:
        logprobs: of `token_ids`, when the request asks for any.
        end_logprobs: of `stop_token_id`, one line; None when the choice had ended before its request was resumed.
    """

    index: int
    token_ids: NDArray[np.int32]
    finish_reason: FinishReason
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    end_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request: all its choices, in order.

    Attributes:
        error: the failure, when any choice ended in `ERROR`.
        cached_tokens: prompt tokens taken from the prefix cache when the first choice was first admitted.
        retained_tokens: prompt tokens in the blocks of the longest prefix that the request retains.
        generated_tokens: tokens sampled for all choices, end tokens included.
        pooled: float32 [hidden], when pooling was requested; of a classifier [labels].
        embeddings: float32 [prompts, size], of an `Embedder`; of a classifier [prompts, labels], its logits.
        started_at, finished_at: on the engine's clock (seconds); admission and end.
        preemptions: how often a choice was preempted and recomputed.
        resumed_tokens: of the generated ones, those that came with the request (`Request.partial`).
        drafted_tokens, accepted_tokens: drafts, and accepted drafts.
        target_logprobs: float32 [targets], of `SamplingParams.prompt_targets`.
        members: completions of the members of a request that has more than one (`Request.more`).
    """

    request_id: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    started_at: float
    finished_at: float
    preemptions: int = 0
    error: str | None = None
    prompt_logprobs: TokenLogprobs | None = None
    pooled: NDArray[np.float32] | None = None
    embeddings: NDArray[np.float32] | None = None
    resumed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    retained_tokens: int = 0
    target_logprobs: NDArray[np.float32] | None = None
    members: tuple[Completion, ...] = ()


def as_token_ids(ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Convert a sequence of token ids to the int32 array that `Request` needs."""
    return np.ascontiguousarray(ids, dtype=np.int32)
