"""An answer as it is told over the lane: tokens and their text as they come, and the whole of it at the end.

Text that could still change is kept back: half a character, and as much as a stop string could begin in. All that is a
function of the tokens, so an attempt that goes on with another's tokens knows what text was told with them. Text that
belongs to a tool call is told as such, and never as content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.request import Choice, Completion, PartialChoice
from schemas.errors import STATUS_CODES, RowError
from schemas.lane import EndEvent, ErrorEvent, HandBackEvent, LaneEvent, LaneRequest, TokensEvent
from schemas.requests import ChatBody, EmbeddingBody
from workers.constraints import shown_tokens
from workers.detokenizer import IncrementalDetokenizer
from workers.lane_requests import PREFIX
from workers.logprobs import TokenTexts, chat_logprobs
from workers.responses import ResponseBuilder, failure_of
from workers.rows import ComputedRow, Envelope, PreparedRow
from workers.tokenizer import Tokenizer
from workers.tool_calls import CallIds, ToolCallReader, told
from workers.tool_formats import find_tool_format


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
        self.kept += "".join(self.detokenizer.push(token_id) for token_id in token_ids)
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
            ids = new.token_ids[skipped:].tolist()
            if not ids:
                continue
            logprobs = None
            if new.logprobs is not None and isinstance(self._body, ChatBody):
                whole = chat_logprobs(self._texts, new.token_ids, new.logprobs, self._body.top_logprobs)
                logprobs = {**whole, "content": whole["content"][skipped:]}
            text = self._growing(new.index).push(ids)
            events.append(self._tokens(new.index, ids, *self._split(new.index, text), logprobs))
        return events

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
        error = failure_of(completion)
        if error is not None:
            return self.failed(error)
        computed = ComputedRow(row, completion)
        response: dict[str, Any] = orjson.loads(builder.results([computed], envelope)[0].response or "{}")
        events: list[LaneEvent] = []
        if isinstance(row.body, EmbeddingBody):
            return [EndEvent(self.request.id, self.request.attempt, self._next(), response)]
        (texts,) = builder.answer_texts([computed])
        for choice, text, shown in zip(completion.choices, texts, response["choices"], strict=True):
            events += self._rest(choice, text, shown)
        return [*events, EndEvent(self.request.id, self.request.attempt, self._next(), response)]

    def failed(self, error: RowError) -> list[LaneEvent]:
        """There is no answer."""
        return refusal(self.request, error, self._next())

    def handed_back(self) -> list[LaneEvent]:
        """Another worker is to go on."""
        return [HandBackEvent(self.request.id, self.request.attempt, self._next())]

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
            detokenizer = IncrementalDetokenizer(self._tokenizer, self._prompt, self._shown)
            reader = None if self._form is None else ToolCallReader(self._form)
            self._choices[choice] = _Growing(detokenizer, self._keep, reader)
        return self._choices[choice]


def refusal(request: LaneRequest, error: RowError, sequence: int = 0) -> list[LaneEvent]:
    """The end of a request that gets no answer."""
    status = STATUS_CODES[error.code]
    return [ErrorEvent(request.id, request.attempt, sequence, error.code.value, error.message, status, error.param)]
