"""Embeddings from any engine that pools: one request for several texts, and the head behind the pooling.

Each text is a separate request to the wrapped engine; a request ends with its last text. A text that fails fails its
request, and the others of the request are cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.engine import EngineStats
from engine.errors import RequestRefused
from engine.request import Choice, Completion, FinishReason, PartialChoice, Request, as_token_ids
from engine.scheduler.latency import ClassStats
from engine.scheduler.resume import ANSWERED
from engine.step_engine import StepEngine

_PART = "\0"
"""Separator of a request's id and a text's number."""


@dataclass(slots=True)
class _Open:
    """A request that is computed: how many texts it has, and those that have ended, by number. `dimensions`: see
    `Request`."""

    count: int
    dimensions: int | None
    done: dict[int, Completion] = field(default_factory=dict)


class Head(Protocol):
    """What follows the pooling (implemented by `EmbeddingHead` and `ScoreHead`)."""

    def apply(self, pooled: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
        """Numbers float32 [texts, size] of pooled states float32 [texts, hidden]."""
        ...


class Embedder:
    """An engine that wraps an engine. Requests without pooling are passed on unchanged."""

    def __init__(self, engine: StepEngine, head: Head) -> None:
        self.engine = engine
        self.clock = engine.clock
        self._head = head
        self._open: dict[str, _Open] = {}
        self._ready: list[Completion] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises as the engine's `add`; then no part of the request is queued."""
        if request.pooling is None:
            self.engine.add(request)
            return
        name = request.request_id
        # The id may be that of one that was cancelled a moment ago.
        self._ready += self._gather(self.engine.take_ended())
        if name in self._open:
            raise RequestRefused(f"request {name!r} is already running; use another request_id")
        prompts = (request.prompt_token_ids, *request.more_prompts)
        added: list[str] = []
        try:
            for number, prompt in enumerate(prompts):
                part = f"{name}{_PART}{number}"
                types = request.token_type_ids[number : number + 1]
                single = replace(
                    request, request_id=part, prompt_token_ids=prompt, more_prompts=(), token_type_ids=types
                )
                self.engine.add(single)
                added.append(part)
        except RequestRefused:
            for part in added:
                self.engine.cancel(part)
            self._ready += self._gather(self.engine.take_ended())  # discarded: the request isn't open
            raise
        self._open[name] = _Open(len(prompts), request.dimensions)

    def settle(self, *, more_to_come: bool) -> None:
        """See `Engine.settle`."""
        self.engine.settle(more_to_come=more_to_come)

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """See `Engine.cancel`. A request that pools has no choices: it ends as a whole."""
        opened = self._open.get(request_id)
        if opened is None:
            return self.engine.cancel(request_id, choice)
        self._drop_rest(request_id, opened)
        return True

    def partial(self, request: Request, given: Mapping[int, int] | None = None) -> tuple[PartialChoice, ...]:
        """See `Engine.partial`; vectors have no partial result."""
        return () if request.pooling is not None else self.engine.partial(request, given)

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return self.engine.has_work or bool(self._ready)

    @property
    def num_waiting(self) -> int:
        """Waiting texts."""
        return self.engine.num_waiting

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    def step(self) -> list[Completion]:
        """See `Engine.step`."""
        ended = self._gather(self.engine.step())
        return self._take_ready() + ended

    def take_ended(self) -> list[Completion]:
        """See `Engine.take_ended`."""
        return self._take_ready() + self._gather(self.engine.take_ended())

    def _take_ready(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def resumes(self, request: Request) -> bool:
        """See `Engine.resumes`."""
        return self.engine.resumes(request)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats()

    def classes(self) -> tuple[ClassStats, ...]:
        """The engine's: each text counts as a request."""
        return self.engine.classes()

    def _gather(self, completions: list[Completion]) -> list[Completion]:
        """Return the requests whose last text is among these."""
        ended: list[Completion] = []
        while completions:
            failed: list[str] = []
            for completion in completions:
                name, separator, number = completion.request_id.rpartition(_PART)
                if not separator:
                    ended.append(completion)
                elif (opened := self._open.get(name)) is not None:
                    opened.done[int(number)] = completion
                    if completion.choices[0].finish_reason not in ANSWERED:
                        failed.append(name)
                    if len(opened.done) == opened.count:
                        del self._open[name]
                        ended.append(self._joined(name, opened))
            for name in failed:
                if (opened := self._open.get(name)) is not None:
                    self._drop_rest(name, opened)
            completions = self.engine.take_ended() if failed else []
        return ended

    def _drop_rest(self, name: str, opened: _Open) -> None:
        for number in range(opened.count):
            if number not in opened.done:
                self.engine.cancel(f"{name}{_PART}{number}")

    def _joined(self, name: str, opened: _Open) -> Completion:
        """Join the texts' completions; the error is that of the first text that failed itself."""
        parts = [opened.done[number] for number in range(opened.count)]
        reasons = [part.choices[0].finish_reason for part in parts]
        wrong = [reason for reason in reasons if reason not in ANSWERED]
        reason = min(wrong, key=lambda reason: reason is FinishReason.CANCELLED) if wrong else reasons[0]
        error = next((part.error for part in parts if part.error is not None), None)
        embeddings: NDArray[np.float32] | None = None
        if not wrong:
            pooled = [part.pooled for part in parts if part.pooled is not None]
            assert len(pooled) == len(parts), "a text that was answered has a vector"
            embeddings = self._head.apply(np.stack(pooled), opened.dimensions)
            if not np.isfinite(embeddings).all():
                reason, error, embeddings = FinishReason.ERROR, "the model gave numbers that are not finite", None
        return Completion(
            request_id=name,
            choices=(Choice(0, as_token_ids([]), reason),),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            generated_tokens=0,
            started_at=min(part.started_at for part in parts),
            finished_at=max(part.finished_at for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            error=error,
            embeddings=embeddings,
        )
