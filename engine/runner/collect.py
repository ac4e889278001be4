"""Collects the results of steps into completions: the choices of a request, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import StepOutput, StepPlan
from engine.request import Choice, Completion, FinishReason, Request, TokenLogprobs
from engine.scheduler.resume import resumed_tokens
from engine.scheduler.sequence import FinishedSequence


class _TokenLogprob(NamedTuple):
    """Log-probabilities at one position."""

    chosen: float
    ids: NDArray[np.int32]
    top: NDArray[np.float32]


@dataclass(slots=True)
class _ChoiceResults:
    """Results of one choice that requests more than tokens."""

    logprobs: list[_TokenLogprob] = field(default_factory=list)
    prompt: TokenLogprobs | None = None
    pooled: NDArray[np.float32] | None = None
    targets: NDArray[np.float32] | None = None


def _unknown(length: int, top: int) -> TokenLogprobs:
    """A table for the log-probabilities of a prompt that has `length` tokens. Long prompts are scored in many chunks:
    an object for each token would take several times the memory."""
    return TokenLogprobs(
        np.full(length, np.nan, dtype=np.float32),
        np.full((length, top), -1, dtype=np.int32),
        np.full((length, top), np.nan, dtype=np.float32),
    )


def _table(lines: list[_TokenLogprob], top: int) -> TokenLogprobs:
    return TokenLogprobs(
        np.array([line.chosen for line in lines], dtype=np.float32),
        np.array([line.ids for line in lines], dtype=np.int32).reshape(len(lines), top),
        np.array([line.top for line in lines], dtype=np.float32).reshape(len(lines), top),
    )


class CompletionCollector:
    """Collects the choices of each request until the last one has ended."""

    def __init__(self) -> None:
        self._done: dict[str, list[FinishedSequence]] = {}
        self._results: dict[tuple[str, int], _ChoiceResults] = {}
        self._at_row: dict[int, _ChoiceResults] = {}

    def resume(self, request: Request) -> None:
        """Store the log-probabilities that came with the request."""
        if request.params.logprobs is None:
            return
        for partial in request.partial:
            if (given := partial.logprobs) is not None:
                lines = [
                    _TokenLogprob(float(c), i, t)
                    for c, i, t in zip(given.chosen, given.top_ids, given.top, strict=True)
                ]
                self._results[request.request_id, partial.index] = _ChoiceResults(lines)

    def ended(self, request_id: str) -> list[FinishedSequence]:
        """Return the ended choices of an unfinished request."""
        return self._done.get(request_id, [])

    def logprobs(self, request: Request, choice: int, start: int, end: int) -> TokenLogprobs | None:
        """Return log-probabilities of a choice's tokens from `start` up to `end`; None when not requested."""
        if request.params.logprobs is None:
            return None
        results = self._results.get((request.request_id, choice))
        return _table([] if results is None else results.logprobs[start:end], request.params.logprobs)

    def begin(self, plan: StepPlan) -> None:
        """Register the owners of the step's new rows."""
        for row, request, choice in plan.new_rows:
            self._at_row.pop(row, None)
            params = request.params
            if params.logprobs is not None or params.scored_from is not None or request.pooling is not None:
                results = self._results.setdefault((request.request_id, choice), _ChoiceResults())
                if params.prompt_targets:
                    results.targets = np.full(len(params.prompt_targets), np.nan, dtype=np.float32)
                if params.prompt_logprobs is not None and choice == 0 and results.prompt is None:
                    results.prompt = _unknown(len(request.prompt_token_ids), params.prompt_logprobs)
                self._at_row[row] = results

    def take(self, output: StepOutput) -> None:
        """Store the step's log-probabilities and pooled states."""
        for row, lines in output.logprobs.items():
            self._at_row[row].logprobs += [_TokenLogprob(*line) for line in lines]
        for row, (first, chosen, ids, top) in output.prompt_logprobs.items():
            prompt, part = self._at_row[row].prompt, slice(first, first + len(chosen))
            assert prompt is not None, "it is scored because the request wants that"
            prompt.chosen[part], prompt.top_ids[part], prompt.top[part] = chosen, ids, top
        for row, (numbers, values) in output.target_logprobs.items():
            targets = self._at_row[row].targets
            assert targets is not None, "only rows with targets have their log-probabilities"
            targets[numbers] = values
        for row, vector in output.pooled.items():
            self._at_row[row].pooled = vector

    def finish(self, sequences: list[FinishedSequence], now: float) -> list[Completion]:
        """Return completions of the requests whose last choice is among these."""
        completions = []
        for sequence in sequences:
            request = sequence.request
            done = self._done.setdefault(request.request_id, [])
            done.append(sequence)
            if len(done) == request.params.n:
                del self._done[request.request_id]
                completions.append(self._completion(request, sorted(done, key=lambda s: s.choice), now))
        return completions

    def _completion(self, request: Request, sequences: list[FinishedSequence], now: float) -> Completion:
        all_results = [self._results.pop((request.request_id, s.choice), None) for s in sequences]
        choices = tuple(
            self._choice(request, sequence, results) for sequence, results in zip(sequences, all_results, strict=True)
        )
        first, results = sequences[0], all_results[0]
        prompt_logprobs = None
        top = request.params.prompt_logprobs
        if top is not None and results is not None and first.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            prompt_logprobs = results.prompt
            if prompt_logprobs is None:  # resumed with all of its tokens: nothing was computed
                prompt_logprobs = _unknown(len(request.prompt_token_ids), top)
        return Completion(
            request_id=request.request_id,
            choices=choices,
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=first.cached_tokens,
            generated_tokens=sum(len(s.token_ids) + (s.stop_token_id is not None) for s in sequences),
            started_at=min(s.started_at for s in sequences),
            finished_at=now,
            preemptions=sum(s.preemptions for s in sequences),
            error=next((s.error for s in sequences if s.error is not None), None),
            prompt_logprobs=prompt_logprobs,
            pooled=None if results is None else results.pooled,
            resumed_tokens=resumed_tokens(request),
            drafted_tokens=sum(s.drafted_tokens for s in sequences),
            accepted_tokens=sum(s.accepted_tokens for s in sequences),
            retained_tokens=first.retained_tokens,
            target_logprobs=None if results is None else results.targets,
        )

    @staticmethod
    def _choice(request: Request, sequence: FinishedSequence, results: _ChoiceResults | None) -> Choice:
        top, stop = request.params.logprobs, sequence.stop_token_id
        logprobs = end_logprobs = None
        if top is not None:
            lines, length = [] if results is None else results.logprobs, len(sequence.token_ids)
            logprobs = _table(lines[:length], top)
            if stop is not None and len(lines) > length:
                end_logprobs = _table(lines[length : length + 1], top)
        return Choice(sequence.choice, sequence.token_ids, sequence.finish_reason, stop, logprobs, end_logprobs)
