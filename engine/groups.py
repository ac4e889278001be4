"""Requests with several members on any engine that takes one: each member is a request of its own to the wrapped
engine, and one completion answers them all (`Request.more`). Members that are only scored share what they have in
common (shared_scores.py).

A member that fails, or is late, fails its request, and the others are cancelled: the request is computed again as a
whole, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.engine import EngineStats
from engine.errors import RequestRefused
from engine.expert_load import ExpertLoad
from engine.request import Choice, Completion, FinishReason, PartialChoice, Request
from engine.scheduler.latency import ClassStats
from engine.scheduler.resume import ANSWERED
from engine.scheduler.slo_control import SloTerms
from engine.shared_scores import SharedScores, is_scored_only, share_scores
from engine.step_engine import StepEngine

_MEMBER = "\1"
"""Separator of a request's id and a member's number."""

_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT)


@dataclass(slots=True)
class _Open:
    """A request that is computed: its members as the engine has them, and those that have ended, by number. The members
    of shared scores are `shared.requests`."""

    members: tuple[Request, ...]
    shared: SharedScores | None = None
    done: dict[int, Completion] = field(default_factory=dict)


class GroupEngine:
    """An engine that wraps an engine. Requests with one member are passed on unchanged.

    Args:
        has_targets: the engine computes `SamplingParams.prompt_targets`.
    """

    def __init__(self, engine: StepEngine, *, has_targets: bool = True) -> None:
        self.engine = engine
        self._has_targets = has_targets
        self.clock: Callable[[], float] = engine.clock
        self._open: dict[str, _Open] = {}
        self._ready: list[Completion] = []

    def add(self, request: Request) -> None:
        """See `StepEngine.add`. When a member is refused, no member is queued, and the message names it by its number
        (`prompt[3]`) unless all are only scored."""
        if not request.more:
            self.engine.add(request)
            return
        name, n = request.request_id, request.params.n
        # The id may be that of one that was cancelled a moment ago.
        self._ready += self._gather(self.engine.take_ended())
        if name in self._open:
            raise RequestRefused(f"request {name!r} is already running; use another request_id")
        members = _singles(request)
        if any(member.params.n != n for member in members):
            raise RequestRefused(f"request {name!r}: its members have different numbers of choices")
        scored = all(map(is_scored_only, members))
        if shared := share_scores(members) if scored and self._has_targets else None:
            members = _numbered(name, shared.requests)
        added: list[str] = []
        try:
            for member in members:
                self.engine.add(member)
                added.append(member.request_id)
        except RequestRefused as error:
            for member_id in added:
                self.engine.cancel(member_id)
            self._ready += self._gather(self.engine.take_ended())  # discarded: the request isn't open
            if not scored:  # else a member is a choice of a prompt
                error.args = (f"prompt[{len(added)}]: {error}",)
            raise
        self._open[name] = _Open(members, shared)

    def settle(self, *, more_to_come: bool) -> None:
        """See `StepEngine.settle`."""
        self.engine.settle(more_to_come=more_to_come)

    def set_drafting(self, *, enabled: bool) -> bool:
        """See `StepEngine.set_drafting`."""
        return self.engine.set_drafting(enabled=enabled)

    def cancel(self, request_id: str, choice: int | None = None) -> bool:
        """See `StepEngine.cancel`. Members that share their scores are cancelled together only."""
        opened = self._open.get(request_id)
        if opened is None:
            return self.engine.cancel(request_id, choice)
        if choice is None:
            return self._cancel_rest(opened)
        if opened.shared is not None:
            return False
        number, own = divmod(choice, opened.members[0].params.n)
        if not 0 <= number < len(opened.members) or number in opened.done:
            return False
        return self.engine.cancel(opened.members[number].request_id, own)

    def partial(
        self, request: Request, given: Mapping[int, int] | None = None, only: Collection[int] | None = None
    ) -> tuple[PartialChoice, ...]:
        """See `StepEngine.partial`. Members that have ended are given as choices that have."""
        opened = self._open.get(request.request_id)
        if opened is None:
            return self.engine.partial(request, given, only)
        if opened.shared is not None:  # no member has ended before all have, and none has tokens
            none = np.empty(0, dtype=np.int32)
            return tuple(PartialChoice(number, none, None) for number in range(len(request.members)))
        given, n = given or {}, request.params.n
        chosen: defaultdict[int, list[int]] = defaultdict(list)
        for choice in sorted(only or ()):
            chosen[choice // n].append(choice % n)
        found: list[PartialChoice] = []
        for number in range(len(opened.members)) if only is None else chosen:
            member = opened.members[number]
            own = {choice: given.get(number * n + choice, 0) for choice in range(n)}
            if (completion := opened.done.get(number)) is None:
                choices = self.engine.partial(member, own, None if only is None else chosen[number])
            elif member.params.max_tokens:
                choices = tuple(ended_choice(choice, own[choice.index]) for choice in _answered(completion))
            else:
                choices = ()  # only a score, which no choice holds
            found += [replace(choice, index=number * n + choice.index) for choice in choices]
        return tuple(found)

    def growing(self) -> Mapping[str, Collection[int]]:
        """See `StepEngine.growing`."""
        found: dict[str, list[int]] = {}
        for name, choices in self.engine.growing().items():
            group, separator, number = name.rpartition(_MEMBER)
            if not separator:
                found.setdefault(name, []).extend(choices)
            elif (opened := self._open.get(group)) is not None and opened.shared is None:
                first = int(number) * opened.members[0].params.n
                found.setdefault(group, []).extend(first + choice for choice in choices)
        return found

    def resumes(self, request: Request) -> bool:
        """See `StepEngine.resumes`: a request does when all of its members do."""
        return all(self.engine.resumes(replace(member, more=())) for member in request.members)

    @property
    def has_work(self) -> bool:
        """Whether another `step` is due."""
        return self.engine.has_work or bool(self._ready)

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    def step(self) -> list[Completion]:
        """See `StepEngine.step`."""
        ended = self._gather(self.engine.step())
        return self._take_ready() + ended

    def take_ended(self) -> list[Completion]:
        """See `StepEngine.take_ended`."""
        return self._take_ready() + self._gather(self.engine.take_ended())

    def set_slo_weights(self, weights: SloTerms) -> bool:
        """Set the engine's."""
        return self.engine.set_slo_weights(weights)

    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats()

    def classes(self) -> tuple[ClassStats, ...]:
        """The engine's: each member counts as a request."""
        return self.engine.classes()

    def expert_load(self) -> ExpertLoad | None:
        """The engine's."""
        return self.engine.expert_load()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _take_ready(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def _gather(self, completions: list[Completion]) -> list[Completion]:
        """Replace the completions of members by those of the requests whose last member is among them."""
        ended: list[Completion] = []
        while completions:
            failed: list[_Open] = []
            for completion in completions:
                name, separator, number = completion.request_id.rpartition(_MEMBER)
                if not separator:
                    ended.append(completion)
                elif (opened := self._open.get(name)) is not None:
                    opened.done[int(number)] = completion
                    if any(choice.finish_reason in _FAILED for choice in completion.choices):
                        failed.append(opened)
                    if len(opened.done) == len(opened.members):
                        del self._open[name]
                        ended.append(_joined(name, opened))
            for opened in failed:
                self._cancel_rest(opened)
            completions = self.engine.take_ended() if failed else []
        return ended

    def _cancel_rest(self, opened: _Open) -> bool:
        rest = [member for number, member in enumerate(opened.members) if number not in opened.done]
        cancelled = [self.engine.cancel(member.request_id) for member in rest]
        return any(cancelled)


def ended_choice(choice: Choice, start: int = 0) -> PartialChoice:
    """A choice of a completion, from this token on, as `StepEngine.partial` returns it. It goes on unless it was
    answered."""
    logprobs = None if choice.logprobs is None else choice.logprobs[start:]
    reason = choice.finish_reason if choice.finish_reason in ANSWERED else None
    return PartialChoice(choice.index, choice.token_ids[start:], logprobs, reason, choice.stop_token_id)


def _singles(request: Request) -> tuple[Request, ...]:
    """The members, each as a request of its own."""
    n = request.params.n
    partial: defaultdict[int, list[PartialChoice]] = defaultdict(list)
    for choice in request.partial:
        partial[choice.index // n].append(replace(choice, index=choice.index % n))
    return tuple(
        replace(
            member,
            priority=request.priority,
            deadline=request.deadline,
            salt=request.salt,
            adapter=request.adapter,
            more=(),
            partial=tuple(partial[number]),
        )
        for number, member in enumerate(_numbered(request.request_id, request.members))
    )


def _numbered(name: str, members: Sequence[Request]) -> tuple[Request, ...]:
    return tuple(replace(one, request_id=f"{name}{_MEMBER}{number}") for number, one in enumerate(members))


def _answered(completion: Completion) -> list[Choice]:
    return [choice for choice in completion.choices if choice.finish_reason in ANSWERED]


def _joined(name: str, opened: _Open) -> Completion:
    """Join the members' completions. Where one failed, the choices that were cancelled for it have its reason."""
    parts = [opened.done[number] for number in range(len(opened.members))]
    if opened.shared is not None:
        parts = opened.shared.completions(parts)
    choices = [
        replace(choice, index=number * len(part.choices) + choice.index)
        for number, part in enumerate(parts)
        for choice in part.choices
    ]
    failure = next((choice.finish_reason for choice in choices if choice.finish_reason in _FAILED), None)
    if failure is not None:
        choices = [
            replace(choice, finish_reason=failure) if choice.finish_reason is FinishReason.CANCELLED else choice
            for choice in choices
        ]
    return Completion(
        request_id=name,
        choices=tuple(choices),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        started_at=min(part.started_at for part in parts),
        finished_at=max(part.finished_at for part in parts),
        preemptions=sum(part.preemptions for part in parts),
        error=next((part.error for part in parts if part.error is not None), None),
        resumed_tokens=sum(part.resumed_tokens for part in parts),
        drafted_tokens=sum(part.drafted_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
        members=tuple(parts),
    )
