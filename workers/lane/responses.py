"""An answer as it is told over the lane: tokens and their text as they come, and the whole of it at the end.

Text that could still change is kept back: half a character, and as much as a stop string could begin in. All that is a
function of the tokens, so an attempt that goes on with another's tokens knows what text was told with them. Text that
belongs to a tool call is told as such, and never as content. Where content policies judge, tokens come here through a
gate (`workers.policies.stream_filter`), and all the rest is as if there were none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.request import Choice, Completion, PartialChoice
from schemas.jobs.results import ResultRow
from schemas.requests.errors import STATUS_CODES, RowError
from schemas.requests.requests import ChatBody, EmbeddingBody
from schemas.workers.lane import EndEvent, ErrorEvent, HandBackEvent, LaneEvent, LaneRequest, TokensEvent
from workers.lane.requests import PREFIX
from workers.policies.policy import PolicyGuard
from workers.policies.stream_filter import PolicyStreamFilter, part
from workers.rows import ComputedRow, Envelope, PreparedRow
from workers.structured.constraints import shown_tokens
from workers.structured.tool_calls import CallIds, ToolCallReader, told
from workers.structured.tool_formats import find_tool_format
from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.logprobs import TokenTexts, chat_logprobs
from workers.text.tokenizer import Tokenizer
from workers.translation.embeddings import embedding_results
from workers.translation.responses import ResponseBuilder, failure_of, withheld_choices


@dataclass(slots=True)
class _Growing:
    """One choice.

    Attributes:
        keep: characters in which a stop string may have begun.
        reader: finds calls in the text; None: there can't be any.
        told: tokens that it has.  characters: of their text, that it has.  kept: text that it will get later.
    """

    detokenizer: IncrementalDetokenizer
    keep: int
    reader: ToolCallReader | None = None
    told: int = 0
    characters: int = 0
    kept: str = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens."""
        self.told += len(token_ids)
        self.kept += self.detokenizer.push_all(token_ids)
        end = max(0, len(self.kept) - self.keep)
        certain, self.kept = self.kept[:end], self.kept[end:]
        self.characters += len(certain)
        return certain


class LaneAnswer:
    """What is told of one attempt at a request. Not thread-safe: one thread tells."""

    def __init__(self, request: LaneRequest, row: PreparedRow, tokenizer: Tokenizer) -> None:
        self.request = request
        self._prompt = row.request.prompt_token_ids
        self._body = row.body
        self._guard = row.guard
        self._gates: dict[int, PolicyStreamFilter] = {}
        self._error: RowError | None = None  # a policy failed
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        stops = () if isinstance(row.body, EmbeddingBody) else row.body.stop
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._choices: dict[int, _Growing] = {}
        self._sequence = 0
        tools = isinstance(row.body, ChatBody) and bool(row.body.offered_tools)
        self._form = find_tool_format(tokenizer) if tools else None
        self._shown = shown_tokens(row.body, tokenizer)
        self._name = f"{PREFIX}{request.id}/{row.names[0].row}"
        for choice, ids in enumerate(request.tokens):
            growing = self._growing(choice)
            text = growing.push(ids)
            if growing.reader is not None:
                growing.reader.push(text)
            if self._guard is not None:
                self._judge(choice, self._guard, ids)
        resumed = {partial.index for partial in row.request.partial}
        # Tokens that the caller has, and that are computed once more all the same.
        self._skip = {choice: len(ids) for choice, ids in enumerate(request.tokens) if choice not in resumed}

    def grown(self, partial: Sequence[PartialChoice]) -> list[LaneEvent]:
        """Tokens that were added to choices which go on."""
        events: list[LaneEvent] = []
        for new in partial:
            skipped = min(self._skip.get(new.index, 0), len(new.token_ids))
            if skipped:
                self._skip[new.index] -= skipped
            cleared = self._cleared(part(new, skipped))
            if cleared is None or not len(cleared.token_ids):
                continue
            logprobs = None
            if cleared.logprobs is not None and isinstance(self._body, ChatBody):
                logprobs = chat_logprobs(self._texts, cleared.token_ids, cleared.logprobs, self._body.top_logprobs)
            ids = cleared.token_ids.tolist()
            text = self._growing(new.index).push(ids)
            events.append(self._tokens(new.index, ids, *self._split(new.index, text), logprobs))
        return events

    def refuses(self, choice: int) -> bool:
        """Whether nothing more of the choice will be told, so that it needn't be computed."""
        return self._error is not None or choice in self._refused

    def _judge(self, choice: int, guard: PolicyGuard, told: Sequence[int]) -> None:
        """What was told of a choice by an earlier attempt, perhaps by a worker with other policies."""
        try:
            self._gate(choice, guard).replay(told)
        except RowError as error:
            self._error = error

    @property
    def _refused(self) -> frozenset[int]:
        return frozenset(choice for choice, gate in self._gates.items() if gate.refused)

    def _cleared(self, new: PartialChoice) -> PartialChoice | None:
        """What of a choice may be told now that these tokens have come."""
        if self._guard is None:
            return new
        if self.refuses(new.index):
            return None
        try:
            return self._gate(new.index, self._guard).push(new)
        except RowError as error:
            self._error = error
            return None

    def _split(self, choice: int, text: str, *, ended: bool = False) -> tuple[str, list[dict[str, Any]] | None]:
        """Content and calls that become certain with this text."""
        reader = self._growing(choice).reader
        if reader is None or self._form is None:
            return text, None
        deltas = [*reader.push(text), *(reader.close() if ended else [])]
        content, calls = told(deltas, CallIds(self._name, choice, self._form.short_ids))
        return content, calls or None

    def ended(
        self, row: PreparedRow, completion: Completion, builder: ResponseBuilder, envelope: Envelope
    ) -> list[LaneEvent]:
        """The rest of all choices, and the response; or why there is none."""
        refused = self._refused
        error = self._error or failure_of(completion, refused, row.request.mask)
        if error is not None:
            return self.failed(error)
        computed = ComputedRow(row, completion, refused)
        if isinstance(row.body, EmbeddingBody):
            return [self._end(_response(embedding_results(computed, envelope)))]
        (texts,) = builder.answer_texts([computed])
        try:
            withheld = withheld_choices(computed, texts)
        except RowError as failed:
            return self.failed(failed)
        response = _response(builder.answered(computed, texts, withheld, envelope))
        events: list[LaneEvent] = []
        for choice, text, shown in zip(completion.choices, texts, response["choices"], strict=True):
            if choice.index not in withheld:
                events += self._rest(choice, text, shown)
        return [*events, self._end(response)]

    def failed(self, error: RowError) -> list[LaneEvent]:
        """There is no answer."""
        return refusal(self.request, error, self._next())

    def handed_back(self) -> list[LaneEvent]:
        """Another worker is to go on."""
        return handed_back(self.request, self._next())

    def _rest(self, choice: Choice, text: str, shown: Mapping[str, Any]) -> list[LaneEvent]:
        """What of a choice that has ended isn't told."""
        growing = self._growing(choice.index)
        ids = choice.token_ids[growing.told :].tolist()
        more, calls = self._split(choice.index, text[growing.characters :], ended=True)
        if not ids and not more and not calls:
            return []
        logprobs = shown["logprobs"] if isinstance(self._body, ChatBody) else None
        if logprobs is not None:
            logprobs = {**logprobs, "content": logprobs["content"][growing.told :]}
        return [self._tokens(choice.index, ids, more, calls, logprobs)]

    def _end(self, response: dict[str, Any]) -> EndEvent:
        policies = None if self._guard is None else self._guard.fingerprint
        return EndEvent(self.request.id, self.request.attempt, self._next(), response, policies)

    def _tokens(
        self,
        choice: int,
        ids: Sequence[int],
        text: str,
        calls: list[dict[str, Any]] | None,
        logprobs: dict[str, Any] | None,
    ) -> TokensEvent:
        request, attempt = self.request.id, self.request.attempt
        return TokensEvent(request, attempt, self._next(), choice, tuple(ids), text, logprobs, calls)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _growing(self, choice: int) -> _Growing:
        if choice not in self._choices:
            reader = None if self._form is None else ToolCallReader(self._form)
            self._choices[choice] = _Growing(self._detokenizer(), self._keep, reader)
        return self._choices[choice]

    def _gate(self, choice: int, guard: PolicyGuard) -> PolicyStreamFilter:
        if choice not in self._gates:
            self._gates[choice] = PolicyStreamFilter(guard, self._detokenizer(), self._keep)
        return self._gates[choice]

    def _detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, self._prompt, self._shown)


def _response(results: Sequence[ResultRow]) -> dict[str, Any]:
    """OpenAI's response body of a request that was answered."""
    response: dict[str, Any] = orjson.loads(results[0].response or "{}")
    return response


def refusal(request: LaneRequest, error: RowError, sequence: int = 0) -> list[LaneEvent]:
    """The end of a request that gets no answer."""
    status = STATUS_CODES[error.code]
    return [ErrorEvent(request.id, request.attempt, sequence, error.code.value, error.message, status, error.param)]


def handed_back(request: LaneRequest, sequence: int = 0) -> list[LaneEvent]:
    """The end of an attempt that another worker is to go on with."""
    return [HandBackEvent(request.id, request.attempt, sequence)]
