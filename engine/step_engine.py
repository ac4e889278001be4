"""The engine interface: what a worker's loop calls, whichever engine computes.

Token ids go in and come out; text, templates, policies and results are the worker's. One thread calls all methods.
`tests/engine/test_step_engine.py` is the contract, which every implementation passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from engine.request import Completion, PartialChoice, Request

if TYPE_CHECKING:
    from engine.engine import EngineStats
    from engine.expert_load import ExpertLoad
    from engine.scheduler.latency import ClassStats
    from engine.scheduler.slo_control import SloTerms


class StepEngine(Protocol):
    """Computes requests step by step; implemented by `Engine`, `EncoderEngine`, `Embedder` and `VLLMEngine`."""

    @property
    def clock(self) -> Callable[[], float]:
        """The engine's clock, in seconds: of deadlines, starts and ends."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that are not computed yet."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that are computed."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; those of a lower `priority` run first.

        Raises:
            RequestRefused: the request can't be computed here; nothing of it is queued.
            ContextLengthExceeded: of these, its prompt and max_tokens never fit.
        """
        ...

    def settle(self, *, more_to_come: bool) -> None:
        """Set whether more requests may be added; if none will, the engine may plan for the end of the work."""
        ...

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """Set the weights by which requests of class 0 and other work share a step (`engine.scheduler.slo_control`),
        from the next planned step on. False: nothing changed, because this engine has no such control."""
        ...

    def set_drafting(self, *, enabled: bool) -> bool:
        """Turn speculation off or on again, from the next step on. True: it is so, also where there is none; False:
        this engine decides by itself."""
        ...

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one choice of it, with reason "cancelled". The next `step` returns its completion, or a
        later one, when its other choices have ended. False: there is no such unfinished request or choice."""
        ...

    def step(self) -> list[Completion]:
        """Compute one step and return the requests that ended with it, failed and cancelled ones included.

        Raises:
            EngineError: the step could not be computed. The rows of the step have ended with reason "error" and the
                next call returns them; the engine is still usable.
            EngineLost: the engine is not usable any more.
        """
        ...

    def take_ended(self) -> list[Completion]:
        """Take the requests that ended outside a successful step: with a failed one, or cancelled. Otherwise the next
        `step` returns them."""
        ...

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """Return the choices of an unfinished request so far, to log them or to resume from them (`Request.partial`).

        Args:
            given: choice -> number of its tokens that the caller has already; only later ones are returned. Unfinished
                choices without new tokens are left out.
            only: these choices, for a caller that asks at each step (`growing`); None: all.
        """
        ...

    def growing(self) -> Mapping[str, Collection[int]]:
        """The requests that may have new tokens, and their choices that may: those that are in the running batch or
        were preempted. They are few, however many wait."""
        ...

    def resumes(self, request: Request) -> bool:
        """Whether this request can go on from tokens that were sampled before (`Request.partial`). If not, it is
        computed again from its beginning."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        ...

    def classes(self) -> tuple[ClassStats, ...]:
        """Latency statistics of each class of requests, the most urgent first."""
        ...

    def expert_load(self) -> ExpertLoad | None:
        """Return the rows that the experts of a mixture have computed since the engine was made; None: there are none,
        or they are not counted. On a GPU it waits for the steps at work."""
        ...

    def close(self) -> None:
        """Release memory and processes; nothing else may be called after it."""
        ...
