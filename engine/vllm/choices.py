"""A request that vLLM computes, and each of its choices, until they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from engine.request import (
    Choice,
    Completion,
    FinishReason,
    PartialChoice,
    Request,
    TokenLogprobs,
    TokenMask,
    TokenWatcher,
    as_token_ids,
)
from engine.sampling.rows import MASK_FAILED
from engine.scheduler.resume import ANSWERED, end_of, resumed_tokens
from engine.vllm.requests import joined


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended. Times are on the engine's clock (seconds)."""

    request: Request
    arrived_at: float
    started_at: float | None = None
    choices: list[ChoiceState] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return all(choice.reason is not None for choice in self.choices)

    def completion(self, now: float) -> Completion:
        """Its completion, when all choices have ended."""
        request, choices = self.request, self.choices
        first, top, prompt_top = choices[0], request.params.logprobs, request.params.prompt_logprobs
        prompt_logprobs = None
        if prompt_top is not None and first.reason in ANSWERED:
            prompt_logprobs = joined(first.prompt_logprobs, prompt_top)[: len(request.prompt_token_ids)]
        return Completion(
            request_id=request.request_id,
            choices=tuple(
                Choice(
                    choice.index, as_token_ids(choice.tokens), cast(FinishReason, choice.reason), choice.stop_token_id,
                    None if top is None else joined(choice.logprobs, top), choice.end_logprobs,
                )
                for choice in choices
            ),
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=min(first.cached or 0, len(request.prompt_token_ids)),
            generated_tokens=sum(len(choice.tokens) + (choice.stop_token_id is not None) for choice in choices),
            started_at=now if self.started_at is None else self.started_at,
            finished_at=now,
            error=next((choice.error for choice in choices if choice.error is not None), None),
            prompt_logprobs=prompt_logprobs,
            pooled=first.pooled,
            resumed_tokens=resumed_tokens(request),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class ChoiceState:
    """A choice until its request ends. Choices are ordered by priority, and then by age.

    Attributes:
        name: vLLM's id of it, while it has it.
        tokens: sampled so far, those that came with the request included, without an end token.
        logprobs: of `tokens`, in runs.  prompt_logprobs: of the prompt, in runs.  end_logprobs: of the end token.
        known: tokens that vLLM got as its prompt.
        has_begun: vLLM has computed these.  computing: of these, those that vLLM is probably computing.
        cached: known tokens from the prefix cache when it began first; None: it has not.
        reason: why it ended; None: it has not.
    """

    owner: OpenRequest
    index: int
    serial: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end_logprobs: TokenLogprobs | None = None
    name: str | None = None
    watcher: TokenWatcher | None = None
    mask: TokenMask | None = None
    known: int = 0
    has_begun: bool = False
    cached: int | None = None
    computing: int = 0
    last_token_at: float | None = None
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    pooled: Any = None

    def __lt__(self, other: ChoiceState) -> bool:
        return (self.priority, self.serial) < (other.priority, other.serial)

    @property
    def priority(self) -> int:
        return self.owner.request.priority

    @property
    def is_urgent(self) -> bool:
        """Whether it is of the first class, the lane's."""
        return self.priority <= 0

    def resume(self, partial: PartialChoice) -> None:
        """Begin with tokens that were sampled before."""
        if len(partial.token_ids):
            self.last_token_at = self.owner.arrived_at
        request, tokens = self.owner.request, partial.token_ids.tolist()
        self.reason, self.stop_token_id = end_of(request, partial), partial.stop_token_id
        if partial.logprobs is not None and request.params.logprobs is not None:
            self.logprobs.append(partial.logprobs)
        if self.reason is not None:
            self.tokens = tokens
        elif self.push_all(tokens):
            self.reason = self.reason or FinishReason.STOP

    def push_all(self, tokens: list[int]) -> bool:
        """Append new tokens up to the one that the choice ends with; returns whether there is such a one."""
        for at, token_id in enumerate(tokens):
            self.tokens.append(token_id)
            if self._ends_with(token_id):
                del tokens[at + 1 :]
                if self.logprobs:  # the last run is that of these tokens
                    self.logprobs[-1] = self.logprobs[-1][: at + 1]
                return True
        return False

    def _ends_with(self, token_id: int) -> bool:
        """Give a token to the choice's mask and watcher; returns whether the choice ends with it."""
        request = self.owner.request
        if request.mask is not None:
            try:
                self._grammar().advance(token_id)
            except Exception as error:  # noqa: BLE001 - it concerns this choice alone
                self.fail(f"{MASK_FAILED}: {type(error).__name__}: {error}")
                return True
        if request.watcher is None:
            return False
        try:
            self.watcher = self.watcher or request.watcher(self.index)
            return self.watcher.push(token_id)
        except Exception as error:  # noqa: BLE001 - it concerns this choice alone
            self.fail(f"a watcher failed: {type(error).__name__}: {error}")
            return True

    def check_end(self, vocab_size: int) -> None:
        """Fail when vLLM has ended the choice with a token that its grammar does not allow there. vLLM ends a choice
        whose grammar it can't follow any further with an end token, or with an error, and does not say why."""
        if self.owner.request.mask is None:
            return
        allowed = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        try:
            self._grammar().fill(allowed)
        except Exception as error:  # noqa: BLE001 - it concerns this choice alone
            self.fail(f"{MASK_FAILED}: {type(error).__name__}: {error}")
            return
        end = self.stop_token_id
        if end is not None and not allowed.view(np.uint32)[end // 32] >> np.uint32(end % 32) & np.uint32(1):
            self.fail(f"{MASK_FAILED}: vLLM ended the answer before its grammar does")

    def fail(self, why: str) -> None:
        """End with an error."""
        self.reason, self.error = FinishReason.ERROR, why

    def _grammar(self) -> TokenMask:
        """The choice's state in its grammar, which follows vLLM's own."""
        if self.mask is None:
            assert self.owner.request.mask is not None, "it has a grammar"
            self.mask = self.owner.request.mask(self.index)
        return self.mask
