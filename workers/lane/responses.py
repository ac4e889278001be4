"""Makes the lane events of an answer: new tokens with their text while it grows, and the whole response at its end.

Text that could still change is buffered: an incomplete character, and as many characters as a stop string could begin
in. The emitted text is a function of the tokens, so an attempt that resumes another one's tokens reconstructs which
text was emitted with them. Text of a thought or of a tool call is emitted as such, never as content. With content
policies, tokens first pass a filter (`workers.policies.stream_filter`); everything else is the same without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from engine.request import Choice, Completion, PartialChoice
from engine.scheduler.resume import ANSWERED
from schemas.jobs.results import ResultRow
from schemas.requests.errors import STATUS_CODES, RowError, RowErrorCode
from schemas.requests.parsing import ChatBody, GenerationBody
from schemas.requests.policy_report import add_report
from schemas.workers.lane import (
    EndEvent,
    ErrorEvent,
    HandBackEvent,
    KVSource,
    LaneEvent,
    LaneRequest,
    Route,
    TokensEvent,
)
from workers.lane.requests import PREFIX
from workers.policies.policy import PolicyGuard
from workers.policies.stream_filter import PolicyStreamFilter, slice_choice
from workers.rows import ComputedRow, Envelope, PreparedRow
from workers.structured.constraints import shown_tokens
from workers.structured.thinking import prompt_state
from workers.structured.tool_calls import CallIds, ToolCallReader, stream_deltas
from workers.structured.tool_formats import find_tool_format
from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.logprobs import TokenTexts, chat_logprobs
from workers.text.reasoning import ReasoningReader
from workers.text.tokenizer import Tokenizer
from workers.translation.responses import ResponseBuilder, failure_of, withheld_choices

DIFFERS: Final = (
    "the worker that computed this answer was lost, and another one computed other tokens than those that were sent; "
    "send the request again"
)
"""An answer that can't be resumed is computed again. Rounding, or vLLM's draws behind other rows, may change it."""


@dataclass(slots=True)
class _ChoiceStream:
    """The stream of one choice.

    Attributes:
        holdback: characters at the end in which a stop string may have begun.
        reasoning: finds thoughts in the text; None: the model marks none.
        reader: finds calls in the rest; None: there can't be any.
        num_tokens: emitted tokens.  num_characters: emitted characters of their text.  buffered: text emitted later.
    """

    detokenizer: IncrementalDetokenizer
    holdback: int
    reasoning: ReasoningReader | None = None
    reader: ToolCallReader | None = None
    num_tokens: int = 0
    num_characters: int = 0
    buffered: str = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens."""
        self.num_tokens += len(token_ids)
        self.buffered += self.detokenizer.push_all(token_ids)
        end = max(0, len(self.buffered) - self.holdback)
        certain, self.buffered = self.buffered[:end], self.buffered[end:]
        self.num_characters += len(certain)
        return certain


class _Certain(NamedTuple):
    """Text that a choice has certainly got, by its kind. `calls`: as in OpenAI's streams."""

    content: str
    reasoning: str
    calls: list[dict[str, Any]] | None


class LaneAnswer:
    """Makes the events of one attempt at a request. Not thread-safe: only the emitter's thread calls it."""

    def __init__(self, request: LaneRequest, row: PreparedRow, tokenizer: Tokenizer) -> None:
        self.request = request
        self._request = row.request
        self._sent_prompts: set[int] = set()  # by number
        self._body = row.body
        self._guard = row.guard
        self._filters: dict[int, PolicyStreamFilter] = {}
        self._error: RowError | None = None  # a policy failed, or the answer differs from what was emitted
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        stops = row.body.stop if isinstance(row.body, GenerationBody) else ()
        self._holdback = max((len(stop) for stop in stops), default=1) - 1
        self._choices: dict[int, _ChoiceStream] = {}
        self._sequence = 0
        tools = isinstance(row.body, ChatBody) and bool(row.body.offered_tools)
        self._form = find_tool_format(tokenizer) if tools else None
        self._shown = shown_tokens(row.body, tokenizer)
        self._markers = tokenizer.reasoning if isinstance(row.body, ChatBody) else None
        self._thinks = prompt_state(row.body, row.request.prompt_token_ids, tokenizer) is True
        self._name = f"{PREFIX}{request.id}/{row.names[0].row}"
        for choice, ids in enumerate(request.tokens):
            stream = self._stream(choice)
            self._split(choice, stream.push(ids))
            if self._guard is not None:
                self._replay(choice, self._guard, ids)
        resumed = {partial.index for partial in row.request.partial}
        # Tokens that the caller has, and that this attempt computes again; and how many of them it has computed.
        self._repeated = {choice: ids for choice, ids in enumerate(request.tokens) if choice not in resumed}
        self._num_repeated = dict.fromkeys(self._repeated, 0)

    def grow(self, partial: Sequence[PartialChoice]) -> list[LaneEvent]:
        """The events of tokens that were added to choices which continue."""
        events: list[LaneEvent] = []
        for new in partial:
            skipped = self._skip(new.index, new.token_ids.tolist())
            cleared = self._filter_tokens(slice_choice(new, skipped))
            if cleared is None or not len(cleared.token_ids):
                continue
            logprobs = None
            if cleared.logprobs is not None and isinstance(self._body, ChatBody):
                logprobs = chat_logprobs(self._texts, cleared.token_ids, cleared.logprobs, self._body.top_logprobs)
            ids = cleared.token_ids.tolist()
            text = self._stream(new.index).push(ids)
            events.append(self._tokens(new.index, ids, self._split(new.index, text), logprobs))
        return events

    def _skip(self, choice: int, token_ids: Sequence[int]) -> int:
        """How many of these new tokens of a choice the caller has. They must be those that the caller has."""
        emitted = self._repeated.get(choice, ())
        start = self._num_repeated.get(choice, 0)
        known = emitted[start : start + len(token_ids)]
        if tuple(token_ids[: len(known)]) != known:
            self._error = RowError(RowErrorCode.ENGINE_ERROR, DIFFERS)
        if known:
            self._num_repeated[choice] += len(known)
        return len(known)

    def refuses(self, choice: int) -> bool:
        """Whether no more tokens of the choice will be emitted, so that it needn't be computed."""
        return self._error is not None or choice in self._refused

    def _replay(self, choice: int, guard: PolicyGuard, token_ids: Sequence[int]) -> None:
        """Judge tokens of a choice that an earlier attempt emitted, perhaps on a worker with other policies."""
        try:
            self._filter(choice, guard).replay(token_ids)
        except RowError as error:
            self._error = error

    @property
    def _refused(self) -> frozenset[int]:
        return frozenset(choice for choice, stream_filter in self._filters.items() if stream_filter.refused)

    def _filter_tokens(self, new: PartialChoice) -> PartialChoice | None:
        """Filter new tokens of a choice; returns the tokens that may be emitted now."""
        if self.refuses(new.index):
            return None
        if self._guard is None:
            return new
        try:
            return self._filter(new.index, self._guard).push(new)
        except RowError as error:
            self._error = error
            return None

    def _split(self, choice: int, text: str, *, ended: bool = False) -> _Certain:
        """What becomes certain with this text."""
        stream = self._stream(choice)
        thought = ""
        if stream.reasoning is not None:
            parts = [*stream.reasoning.push(text), *(stream.reasoning.close() if ended else [])]
            thought, text = "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
        if stream.reader is None or self._form is None:
            return _Certain(text, thought, None)
        deltas = [*stream.reader.push(text), *(stream.reader.close() if ended else [])]
        content, calls = stream_deltas(deltas, CallIds(self._name, choice, self._form.short_ids))
        return _Certain(content, thought, calls or None)

    def end(
        self, row: PreparedRow, completion: Completion, builder: ResponseBuilder, envelope: Envelope
    ) -> list[LaneEvent]:
        """The events with the rest of all choices and the response, or with the error."""
        refused = self._refused
        for choice in completion.choices:
            self._skip(choice.index, choice.token_ids[self._num_repeated.get(choice.index, 0) :].tolist())
            is_short = self._num_repeated.get(choice.index, 0) < len(self._repeated.get(choice.index, ()))
            if is_short and choice.finish_reason in ANSWERED:
                self._error = RowError(RowErrorCode.ENGINE_ERROR, DIFFERS)
        error = self._error or failure_of(completion, refused, row.request.mask)
        if error is not None:
            return self.fail(error)
        computed = ComputedRow(row, completion, refused)
        if not isinstance(row.body, GenerationBody):
            return [self._end(_response(builder.pooled(computed, envelope)))]
        (texts,) = builder.answer_texts([computed])
        try:
            withheld = withheld_choices(computed, texts)
        except RowError as failure:
            return self.fail(failure)
        response = _response(builder.answered(computed, texts, withheld, envelope))
        events: list[LaneEvent] = []
        for choice, text, shown in zip(completion.choices, texts, response["choices"], strict=True):
            if choice.index not in withheld:
                events += self._rest(choice, text, shown)
        return [*events, self._end(response)]

    def fail(self, error: RowError) -> list[LaneEvent]:
        """The event of an error."""
        return refusal_events(self.request, error, self._next_sequence())

    def hand_back(self, kv_source: KVSource | None = None) -> list[LaneEvent]:
        """The event that hands the request back to the lane for another worker. `kv_source`: where its prompt's blocks
        are."""
        return hand_back_events(self.request, self._next_sequence(), kv_source)

    def _rest(self, choice: Choice, text: str, shown: Mapping[str, Any]) -> list[LaneEvent]:
        """The event with the tokens of an ended choice that were not emitted."""
        stream = self._stream(choice.index)
        ids = choice.token_ids[stream.num_tokens :].tolist()
        more = self._split(choice.index, text[stream.num_characters :], ended=True)
        if not ids and not any(more):
            return []
        logprobs = shown["logprobs"] if isinstance(self._body, ChatBody) else None
        if logprobs is not None:
            logprobs = {**logprobs, "content": logprobs["content"][stream.num_tokens :]}
        return [self._tokens(choice.index, ids, more, logprobs)]

    def _end(self, response: dict[str, Any]) -> EndEvent:
        if self._guard is not None:
            response = add_report(response, self._guard.report)
        policies = None if self._guard is None else self._guard.fingerprint
        return EndEvent(self.request.id, self.request.attempt, self._next_sequence(), response, policies)

    def _tokens(
        self, choice: int, ids: Sequence[int], certain: _Certain, logprobs: dict[str, Any] | None
    ) -> TokensEvent:
        position = self.request.id, self.request.attempt, self._next_sequence()
        number, prompt = choice // self._request.params.n, None
        wants_ids = isinstance(self._body, GenerationBody) and self._body.return_token_ids
        if wants_ids and number not in self._sent_prompts:
            self._sent_prompts.add(number)
            prompt = tuple(self._request.member_of(choice).prompt_token_ids.tolist())
        return TokensEvent(
            *position, choice, tuple(ids), certain.content, logprobs, certain.calls, certain.reasoning, prompt
        )

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _stream(self, choice: int) -> _ChoiceStream:
        if choice not in self._choices:
            reader = None if self._form is None else ToolCallReader(self._form)
            reasoning = None if self._markers is None else ReasoningReader(self._markers, self._thinks)
            self._choices[choice] = _ChoiceStream(self._detokenizer(choice), self._holdback, reasoning, reader)
        return self._choices[choice]

    def _filter(self, choice: int, guard: PolicyGuard) -> PolicyStreamFilter:
        if choice not in self._filters:
            self._filters[choice] = PolicyStreamFilter(guard, self._detokenizer(choice), self._holdback)
        return self._filters[choice]

    def _detokenizer(self, choice: int) -> IncrementalDetokenizer:
        prompt = self._request.member_of(choice).prompt_token_ids
        return IncrementalDetokenizer(self._tokenizer, prompt, self._shown)


def _response(results: Sequence[ResultRow]) -> dict[str, Any]:
    """The response body, as in OpenAI's API."""
    response: dict[str, Any] = orjson.loads(results[0].response or "{}")
    return response


def refusal_events(request: LaneRequest, error: RowError, sequence: int = 0) -> list[LaneEvent]:
    """The event that ends a request with an error."""
    head, status = (request.id, request.attempt, sequence), STATUS_CODES[error.code]
    return [ErrorEvent(*head, error.code.value, error.message, status, error.param, error.fields)]


def response_events(request: LaneRequest, response: dict[str, Any]) -> list[LaneEvent]:
    """The event that ends a request with a response that the engine had no part in."""
    return [EndEvent(request.id, request.attempt, 0, response)]


def hand_back_events(
    request: LaneRequest, sequence: int = 0, kv_source: KVSource | None = None, route: Route | None = None
) -> list[LaneEvent]:
    """The event that ends an attempt, which another worker continues."""
    return [HandBackEvent(request.id, request.attempt, sequence, kv_source, route)]
