"""Embeddings and logits from any engine that pools: the head behind the pooling.

A request's texts are its members (`Request.more`), which a `GroupEngine` below computes each by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.engine import EngineStats
from engine.expert_load import ExpertLoad
from engine.request import Completion, FinishReason, PartialChoice, Request
from engine.scheduler.latency import ClassStats
from engine.scheduler.resume import ANSWERED
from engine.scheduler.slo_control import SloTerms
from engine.step_engine import StepEngine


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
        self._open: dict[str, int | None] = {}  # request that pools -> its `dimensions`
        self._ready: list[Completion] = []

    def add(self, request: Request) -> None:
        """See `StepEngine.add`."""
        # The id may be that of one that was cancelled a moment ago.
        self._ready += self._finished(self.engine.take_ended())
        self.engine.add(request)
        if request.pooling is not None:
            self._open[request.request_id] = request.dimensions

    def settle(self, *, more_to_come: bool) -> None:
        """See `StepEngine.settle`."""
        self.engine.settle(more_to_come=more_to_come)

    def set_drafting(self, *, enabled: bool) -> bool:
        """See `StepEngine.set_drafting`."""
        return self.engine.set_drafting(enabled=enabled)

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """See `StepEngine.cancel`. A request that pools has no choices: it ends as a whole."""
        return self.engine.cancel(request_id, None if request_id in self._open else choice)

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """See `StepEngine.partial`; vectors have no partial result."""
        return () if request.pooling is not None else self.engine.partial(request, given, only)

    def growing(self) -> Mapping[str, Collection[int]]:
        """See `Engine.growing`."""
        return self.engine.growing()

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
        """See `StepEngine.step`."""
        ended = self._finished(self.engine.step())
        return self._take_ready() + ended

    def take_ended(self) -> list[Completion]:
        """See `StepEngine.take_ended`."""
        return self._take_ready() + self._finished(self.engine.take_ended())

    def resumes(self, request: Request) -> bool:
        """See `StepEngine.resumes`."""
        return self.engine.resumes(request)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """Set the engine's."""
        return self.engine.set_slo_weights(weights)

    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats()

    def classes(self) -> tuple[ClassStats, ...]:
        """The engine's: each text counts as a request."""
        return self.engine.classes()

    def expert_load(self) -> ExpertLoad | None:
        """The engine's."""
        return self.engine.expert_load()

    def _take_ready(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def _finished(self, completions: list[Completion]) -> list[Completion]:
        """The completions; those of requests that pool with the head's numbers."""
        return [
            self._with_numbers(one, self._open.pop(one.request_id)) if one.request_id in self._open else one
            for one in completions
        ]

    def _with_numbers(self, completion: Completion, dimensions: int | None) -> Completion:
        parts = completion.members or (completion,)
        done = replace(completion, members=(), pooled=None)
        if any(choice.finish_reason not in ANSWERED for choice in completion.choices):
            return done
        pooled = [part.pooled for part in parts if part.pooled is not None]
        assert len(pooled) == len(parts), "a text that was answered has a vector"
        embeddings = self._head.apply(np.stack(pooled), dimensions)
        if np.isfinite(embeddings).all():
            return replace(done, embeddings=embeddings)
        failed = tuple(replace(choice, finish_reason=FinishReason.ERROR) for choice in done.choices)
        return replace(done, choices=failed, error="the model gave numbers that are not finite")
