"""A simulated worker: continuous batching with chunked prefill, a step at a time.

A step holds the next token of each decoding row and, up to its budget, chunks of prompts in their order (Sarathi-Serve,
Agrawal et al. 2024, section 4). While rows decode, the chunks are no larger than keeps the step within the target for
the time between tokens, as the engine's SLO control settles on; at least `MIN_CHUNK_TOKENS`. A request is admitted when
the KV cache has room for its prompt and its whole answer, so nothing is preempted.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pipeline.lane.placement import MIN_CHUNK_TOKENS
from pipeline.simulator.serving.requests import SimulatedRequest
from pipeline.simulator.serving.roofline import PromptChunk, StepRoofline

CHUNK_STEP_TOKENS: Final = 64
"""Tokens up to which a chunk may be smaller than the largest one in time."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """A worker.

    Attributes:
        roofline: times of its steps.
        step_tokens: tokens of a step, at most.  max_rows: requests that it holds, at most.
        itl_seconds: target of the SLO control.
    """

    roofline: StepRoofline
    step_tokens: int
    max_rows: int
    itl_seconds: float


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        seconds: of the step.
        rows: that got their next token after exactly this time.
        joined: rows that got their first token on this worker after another time.
        prompts: whose last chunk was computed: their first token is there.
        ended: rows whose answer is complete.
    """

    seconds: float
    rows: int
    joined: list[SimulatedRequest]
    prompts: list[SimulatedRequest]
    ended: list[SimulatedRequest]


@dataclass(slots=True)
class SimulatedReplica:
    """One worker. `number`: unique in the simulation, as its links' name.

    Attributes:
        kv_tokens, kv_tokens_used: for which its cache has room, and that are reserved.
        rows, context_tokens: that decode, and the tokens that they read in the next step.
        prompts: admitted ones that are not computed yet.
        is_stepping: a step is running.  fetches: transfers that it receives.
        computed_tokens, steps, busy_seconds: in total.
    """

    number: int
    settings: ReplicaSettings
    kv_tokens: int = 0
    kv_tokens_used: int = 0
    held: int = 0
    rows: int = 0
    context_tokens: int = 0
    prompts: deque[SimulatedRequest] = field(default_factory=deque)
    is_stepping: bool = False
    fetches: int = 0
    computed_tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    _chunks: list[tuple[SimulatedRequest, int]] = field(default_factory=list)
    _ends: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    _joining: list[SimulatedRequest] = field(default_factory=list)
    _joined: list[SimulatedRequest] = field(default_factory=list)
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self.kv_tokens = self.settings.roofline.kv_tokens

    @property
    def prompt_tokens_left(self) -> int:
        """Tokens of admitted prompts that are not computed yet."""
        return sum(prompt.waiting_tokens for prompt in self.prompts)

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens fits now."""
        return self.held < self.settings.max_rows and self.kv_tokens_used + tokens <= self.kv_tokens

    def reserve(self, tokens: int) -> None:
        """Reserve room for a request."""
        self.held += 1
        self.kv_tokens_used += tokens

    def release(self, tokens: int) -> None:
        """Release the room of a request."""
        self.held -= 1
        self.kv_tokens_used -= tokens

    def join(self, request: SimulatedRequest) -> None:
        """Begin to decode a request whose keys and values have arrived, with the next step."""
        self._joining.append(request)

    def begin_step(self) -> float | None:
        """Plan a step; returns its duration in seconds, None without any work."""
        self._joined, self._joining = self._joining, []
        for request in self._joined:
            self.decode(request)
        self._chunks = self._chunks_of(self.settings.step_tokens - self.rows)
        if not self._chunks and not self.rows:
            return None
        self._seconds = self._step_seconds(self._chunks)
        if self._chunks and self.rows and self._seconds > self.settings.itl_seconds:
            self._chunks = self._chunks_in_time()
            self._seconds = self._step_seconds(self._chunks)
        self.is_stepping = True
        return self._seconds

    def end_step(self) -> StepResult:
        """Apply the running step, which ends now."""
        self.is_stepping = False
        self.steps += 1
        self.busy_seconds += self._seconds
        self.computed_tokens += self.rows + sum(tokens for _, tokens in self._chunks)
        self.context_tokens += self.rows
        result = StepResult(self._seconds, self.rows - len(self._joined), self._joined, [], [])
        while self._ends and self._ends[0][0] <= self.steps:
            _, _, request = heapq.heappop(self._ends)
            self.rows -= 1
            self.context_tokens -= request.total_tokens
            result.ended.append(request)
        for prompt, tokens in self._chunks:
            prompt.computed_tokens = prompt.prompt_tokens - prompt.waiting_tokens + tokens
            if not prompt.waiting_tokens:
                self.prompts.popleft()  # prompts are computed in their order, so it is the first
                result.prompts.append(prompt)
        return result

    def decode(self, request: SimulatedRequest) -> None:
        """Decode a request with an answer of at least two tokens, from the next step on."""
        self.rows += 1
        self.context_tokens += request.prompt_tokens + 1
        heapq.heappush(self._ends, (self.steps + request.answer_tokens - 1, request.number, request))

    def _chunks_in_time(self) -> list[tuple[SimulatedRequest, int]]:
        """The chunks of a step that is too long, made smaller."""
        low, high = MIN_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, sum(tokens for _, tokens in self._chunks))
        while high - low >= CHUNK_STEP_TOKENS:  # low is in time, or the least; high is not
            middle = (low + high) // 2
            if self._step_seconds(self._chunks_of(middle)) <= self.settings.itl_seconds:
                low = middle
            else:
                high = middle
        return self._chunks_of(low)

    def _chunks_of(self, budget: int) -> list[tuple[SimulatedRequest, int]]:
        """Chunks of the first prompts, of so many tokens together."""
        chunks = []
        for prompt in self.prompts:
            if budget <= 0:
                break
            tokens = min(budget, prompt.waiting_tokens)
            chunks.append((prompt, tokens))
            budget -= tokens
        return chunks

    def _step_seconds(self, chunks: list[tuple[SimulatedRequest, int]]) -> float:
        parts = [PromptChunk(prompt.prompt_tokens - prompt.waiting_tokens, tokens) for prompt, tokens in chunks]
        return self.settings.roofline.step_seconds(self.rows, self.context_tokens, parts)
