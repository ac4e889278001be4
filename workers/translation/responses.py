"""Builds results from the engine's completions: OpenAI's response bodies as JSON, and rows of the result table.

A shard's texts are decoded in one call. A copy gets the same answer under its own custom id and response id. Its usage
is that of an API which has the whole prompt cached: the same prompt and completion tokens, all prompt tokens cached.
The job's usage counts only the computed rows.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
import structlog

from engine.models.encoders.classifier import ClassifierSettings
from engine.request import Choice, Completion, FinishReason, Request
from schemas.jobs.results import ResultRow, RowStatus
from schemas.requests.bodies import REASONING_NAMES
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import Body, ChatBody, CompletionBody, GenerationBody
from schemas.requests.policy_report import PolicyReport, add_report
from workers.policies.concurrency import for_each_row
from workers.policies.retry import JudgingInterrupted, PolicyRetry
from workers.rows import ComputedRow, Envelope, FinishedRow, PreparedRow, RejectedRow, RowName, response_id
from workers.structured.constraints import shown_tokens
from workers.structured.grammar import Grammar, too_complex
from workers.structured.tool_calls import CallIds, split_answer
from workers.structured.tool_formats import find_tool_format
from workers.text.logprobs import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from workers.text.reasoning import SplitReasoning, without_marks
from workers.text.tokenizer import Tokenizer
from workers.translation.pooled import pooled_results
from workers.translation.reasoning import count_reasoning_tokens, split_texts
from workers.translation.requests import StopWatchers
from workers.translation.tries import count_former_tries, count_tries
from workers.translation.unexpected import unforeseen

FAILURES: Final = {
    FinishReason.TIMEOUT: RowErrorCode.REQUEST_TIMEOUT,
    FinishReason.CANCELLED: RowErrorCode.BATCH_CANCELLED,
    FinishReason.ERROR: RowErrorCode.ENGINE_ERROR,
}
"""Finish reasons that are failures. `CANCELLED` never reaches a result while a worker drains, because it releases its
shards."""

MESSAGES: Final = {
    FinishReason.TIMEOUT: "the request took longer than the time a request may take; shorten it or raise the limit",
    FinishReason.CANCELLED: "the request was cancelled",
    FinishReason.ERROR: "the engine could not compute the answer",
}

CONTENT_FILTER: Final = "content_filter"
"""Finish reason of a choice whose text is withheld. As with OpenAI and Azure the response still is an answer with its
usage and its other choices: status 200, with empty text for this choice."""

logger = structlog.get_logger(__name__)


def failure_of(completion: Completion, withheld: frozenset[int] = frozenset(), mask: object = None) -> RowError | None:
    """The error of a completion, or None when it is an answer. One failed choice fails the row, unless it is withheld.
    `mask`: the request's token mask, whose grammar may have caused the error."""
    for choice in completion.choices:
        code = FAILURES.get(choice.finish_reason)
        if code is not None and choice.index not in withheld:
            message = completion.error if choice.finish_reason is FinishReason.ERROR else None
            if message is not None and (reason := too_complex(message)) is not None:
                param = mask.source.param if isinstance(mask, Grammar) else None
                what = f"{param or 'the answer'} has a grammar that reached a limit while the answer was made"
                return RowError(RowErrorCode.INVALID_REQUEST, f"{what}: {reason}; simplify it", param=param)
            return RowError(code, message or MESSAGES[choice.finish_reason])
    return None


class ResponseBuilder:
    """Builds the results of one model's rows. `classifier`: see `ModelLimits`.  `retry`: of rows of jobs."""

    def __init__(
        self, tokenizer: Tokenizer, classifier: ClassifierSettings | None = None, retry: PolicyRetry | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._classifier = classifier
        self._retry = retry
        self._texts = TokenTexts(tokenizer)
        self._tool_format = find_tool_format(tokenizer)

    def pooled(self, row: ComputedRow, envelope: Envelope) -> list[ResultRow]:
        """The results of a row that is answered with numbers, and of its copies."""
        return pooled_results(row, envelope, self._classifier)

    def results(self, rows: Iterable[FinishedRow], envelope: Envelope) -> list[ResultRow]:
        """One result for each row and each copy. A row whose result can't be built fails. Raises
        `JudgingInterrupted`."""
        answered: list[ComputedRow] = []
        results: list[ResultRow] = []
        for row in rows:
            if isinstance(row, RejectedRow):
                refused = _refused(row.names, row.model, row.error, row.started_at, row.finished_at, envelope)
                results += _with_report(count_former_tries(refused, row), row.report)
            elif (error := failure_of(row.completion, row.withheld, row.prepared.request.mask)) is not None:
                results += _with_report(_with_tries(row, _failed(row, error, envelope)), row.prepared.report)
            elif not isinstance(row.prepared.body, GenerationBody):
                pooled = _build_or_fail(row, envelope, partial(self.pooled, row, envelope))
                results += _with_report(pooled, row.prepared.report)
            else:
                answered.append(row)
        pairs = list(zip(answered, self._decode_rows(answered), strict=True))
        concurrency = max((row.prepared.guard.concurrency for row in answered if row.prepared.guard), default=1)
        for rows_of_one in for_each_row(partial(self._judged_answer, envelope), pairs, concurrency):
            results += rows_of_one
        return results

    def _judged_answer(self, envelope: Envelope, pair: tuple[ComputedRow, list[str] | None]) -> list[ResultRow]:
        """The results of an answered row, or of its failure. Threads may make those of different rows."""
        row, texts = pair
        built = _build_or_fail(row, envelope, partial(self._answer, row, texts, envelope))
        return _with_report(_with_tries(row, built), row.prepared.report)

    def content(self, row: ComputedRow) -> str:
        """The text of a chat's only choice, without its thought."""
        (texts,) = self.answer_texts([row])
        (split,) = split_texts(row.prepared, texts, self._tokenizer)
        return split.content

    def _decode_rows(self, rows: Sequence[ComputedRow]) -> Sequence[list[str] | None]:
        """The texts of each row; None for all of them: one row fails, so each must be decoded by itself."""
        try:
            return self.answer_texts(rows)
        except Exception as error:  # noqa: BLE001 - raised again by the row that causes it
            logger.warning("answers can't be decoded in one batch", rows=len(rows), error=type(error).__name__)
            return [None] * len(rows)

    def _answer(self, row: ComputedRow, texts: list[str] | None, envelope: Envelope) -> list[ResultRow]:
        """The results of an answered row. Raises `RowError` when a content policy fails."""
        if texts is None:
            (texts,) = self.answer_texts([row])
        return self.answered(row, texts, withheld_choices(row, texts, self._retry), envelope)

    def answer_texts(self, rows: Sequence[ComputedRow]) -> list[list[str]]:
        """The decoded text of each choice of each row, tool calls and thoughts included."""
        prompts, answers = [], []
        for row in rows:
            for choice in row.completion.choices:
                prompts.append(row.prepared.request.member_of(choice.index).prompt_token_ids)
                answers.append(choice.token_ids)
        decoded = iter(self._tokenizer.decode_answers(prompts, answers))
        return [[self._text(row.prepared, choice, next(decoded)) for choice in row.completion.choices] for row in rows]

    def _text(self, prepared: PreparedRow, choice: Choice, decoded: str) -> str:
        """The text of a choice: cut at its stop string, or all decoded text (with that of an end token, if wanted)."""
        request = prepared.request.member_of(choice.index)
        watchers, own = request.watcher, choice.index % request.params.n
        stopped_text = watchers.text(own) if isinstance(watchers, StopWatchers) else None
        if stopped_text is not None:
            return stopped_text
        shown = shown_tokens(prepared.body, self._tokenizer)
        prompt = request.prompt_token_ids
        if _includes_stop(prepared.body) and choice.stop_token_id is not None:
            return self._tokenizer.decode_showing(prompt, [*choice.token_ids.tolist(), choice.stop_token_id], shown)
        if shown and not shown.keys().isdisjoint(choice.token_ids.tolist()):
            return self._tokenizer.decode_showing(prompt, choice.token_ids, shown)
        return without_marks(decoded) if shown else decoded

    def answered(
        self, row: ComputedRow, texts: list[str], withheld: frozenset[int], envelope: Envelope
    ) -> list[ResultRow]:
        """The results of an answered row, whose choices have these texts, and of its copies."""
        prepared, completion = row.prepared, row.completion
        body = prepared.body
        started, finished = envelope.wall(completion.started_at), envelope.wall(completion.finished_at)
        details: dict[str, Any] = {}
        if isinstance(body, ChatBody):
            kind, name = "chatcmpl", "chat.completion"
            answer = f"{envelope.job}/{prepared.names[0].row}"
            splits = split_texts(prepared, texts, self._tokenizer)
            choices = [
                _withheld_choice(body, c.index)
                if c.index in withheld
                else self._chat_choice(body, c, text, split, answer)
                for c, text, split in zip(completion.choices, texts, splits, strict=True)
            ]
            if self._tokenizer.reasoning is not None:
                pairs = zip(completion.choices, splits, strict=True)
                thought = sum(count_reasoning_tokens(prepared, c, split, self._tokenizer) for c, split in pairs)
                details = {"completion_tokens_details": {"reasoning_tokens": thought}}
        else:
            assert isinstance(body, CompletionBody), "embeddings have no text"
            kind, name = "cmpl", "text_completion"
            choices = [
                _withheld_choice(body, at) if at in withheld else self._completion_choice(body, row, at, texts[at])
                for at in range(len(texts))
            ]
        response = {"id": "", "object": name, "created": int(started.timestamp()), "model": body.model}
        response["choices"] = choices
        _name_stops(choices, prepared.request)
        if body.prompt_logprobs is not None:
            self._add_prompt_logprobs(response, row, body.prompt_logprobs)
        if body.return_token_ids:
            _add_token_ids(response, prepared, completion, withheld)

        truncated = prepared.truncated_tokens(completion.prompt_tokens)

        def result(index: int, row_name: RowName) -> ResultRow:
            cached = completion.cached_tokens if index == 0 else completion.prompt_tokens
            response["id"] = response_id(kind, envelope.job, row_name.row)
            response["usage"] = _usage(prepared, completion, cached, truncated) | details
            shown = response
            if prepared.dialect is not None and isinstance(body, ChatBody):
                shown = prepared.dialect.response(response, body)
            return ResultRow(
                custom_id=row_name.custom_id,
                row=row_name.row,
                status=RowStatus.SUCCEEDED,
                status_code=200,
                text=choices[0]["text"] if kind == "cmpl" else choices[0]["message"]["content"] or "",
                reasoning=None if kind == "cmpl" else choices[0]["message"].get("reasoning_content"),
                finish_reason=choices[0]["finish_reason"],
                response=orjson.dumps(shown).decode(),
                model=body.model,
                prompt_tokens=completion.prompt_tokens,
                cached_tokens=cached,
                completion_tokens=completion.generated_tokens,
                created_at=envelope.created_at,
                started_at=started,
                finished_at=finished,
                attempt=envelope.attempt,
                truncated_tokens=truncated,
            )

        return [result(index, row_name) for index, row_name in enumerate(prepared.names)]

    def _chat_choice(
        self, body: ChatBody, choice: Choice, text: str, split: SplitReasoning, answer: str
    ) -> dict[str, Any]:
        """A choice with this decoded text, split into reasoning, content and tool calls. `answer`: identifies the
        answer in the calls' ids."""
        logprobs = None
        if choice.logprobs is not None:
            token_ids = choice.token_ids[: self._num_tokens_within(body, choice, text)]
            logprobs = chat_logprobs(self._texts, token_ids, choice.logprobs, body.top_logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": split.content, "refusal": None}
        if self._tokenizer.reasoning is not None:
            message |= dict.fromkeys(REASONING_NAMES, split.reasoning)
        reason = str(choice.finish_reason)
        if body.offered_tools and self._tool_format is not None:
            ids = CallIds(answer, choice.index, self._tool_format.short_ids)
            called = split_answer(self._tool_format, split.content, ids)
            message["content"] = called.content
            if called.calls:
                message |= {"content": called.content or None, "tool_calls": called.calls}
            if called.whole and choice.finish_reason is FinishReason.STOP:
                reason = "tool_calls"
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _add_prompt_logprobs(self, response: dict[str, Any], row: ComputedRow, top: int) -> None:
        """Add the prompts' log-probabilities as vLLM does: to the response, or of completions to each choice."""
        request, completions = row.prepared.request, row.completion.members or (row.completion,)
        scores = [
            prompt_logprobs(self._texts, member.prompt_token_ids, scored.prompt_logprobs, top)
            for member, scored in zip(request.members, completions, strict=True)
            if scored.prompt_logprobs is not None
        ]
        if isinstance(row.prepared.body, ChatBody):
            (response["prompt_logprobs"],) = scores
            return
        for choice in response["choices"]:
            choice["prompt_logprobs"] = scores[choice["index"] // request.params.n]

    def _completion_choice(self, body: CompletionBody, row: ComputedRow, index: int, text: str) -> dict[str, Any]:
        choice = row.completion.choices[index]
        runs = []
        prompt = ""
        if body.echo:
            request = row.prepared.request
            number, ids = index // request.params.n, request.member_of(index).prompt_token_ids
            given = body.prompts[number]
            is_cut = row.prepared.truncated_tokens(row.completion.prompt_tokens) is not None
            prompt = given if isinstance(given, str) and not is_cut else self._tokenizer.decode(ids)
            scored = (row.completion.members or (row.completion,))[number]
            if scored.prompt_logprobs is not None:
                runs.append((ids, scored.prompt_logprobs))
        if choice.logprobs is not None:
            runs.append((choice.token_ids[: self._num_tokens_within(body, choice, text)], choice.logprobs))
            # Callers that score a prompt drop the last entry, which must be the generated token's, as with vLLM.
            if body.echo and choice.stop_token_id is not None and choice.end_logprobs is not None:
                runs.append((np.array([choice.stop_token_id], dtype=np.int32), choice.end_logprobs))
        logprobs = None if body.logprobs is None else completion_logprobs(self._texts, runs, body.logprobs)
        return {
            "index": choice.index,
            "text": prompt + text,
            "logprobs": logprobs,
            "finish_reason": str(choice.finish_reason),
        }

    def _num_tokens_within(self, body: ChatBody | CompletionBody, choice: Choice, text: str) -> int:
        """Number of tokens that begin within the choice's decoded text, which may be cut before a stop string."""
        if choice.finish_reason is not FinishReason.STOP or choice.stop_token_id is not None:
            return len(choice.token_ids)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = shown_tokens(body, self._tokenizer)
        characters = 0
        for count, token_id in enumerate(choice.token_ids.tolist()):
            if characters >= len(text):
                return count
            if token_id in shown:
                characters += len(shown[token_id])
            elif not self._texts.is_special(token_id):
                characters += len(decoder.decode(self._texts.bytes_of(token_id)))
        return len(choice.token_ids)


def withheld_choices(row: ComputedRow, texts: Sequence[str], retry: PolicyRetry | None = None) -> frozenset[int]:
    """The choices whose text the content policies withhold. Raises `RowError` when a policy fails, and
    `JudgingInterrupted`."""
    guard = row.prepared.guard
    if guard is None:
        return row.withheld
    choices = [choice.index for choice in row.completion.choices]
    judged = ((index, text) for index, text in zip(choices, texts, strict=True) if index not in row.withheld)
    return row.withheld | {index for index, text in judged if guard.refuses(text, retry)}


def _includes_stop(body: Body) -> bool:
    return isinstance(body, GenerationBody) and body.include_stop_str_in_output


def _add_token_ids(
    response: dict[str, Any], prepared: PreparedRow, completion: Completion, withheld: frozenset[int]
) -> None:
    """Add token ids as vLLM does: the prompt's to the response (of completions: to each choice), and to each choice its
    own, end token included."""
    for choice, shown in zip(completion.choices, response["choices"], strict=True):
        ending = [] if choice.stop_token_id is None else [choice.stop_token_id]
        shown["token_ids"] = None if choice.index in withheld else choice.token_ids.tolist() + ending
        if isinstance(prepared.body, CompletionBody):
            shown["prompt_token_ids"] = prepared.request.member_of(choice.index).prompt_token_ids.tolist()
    if isinstance(prepared.body, ChatBody):
        response["prompt_token_ids"] = prepared.request.prompt_token_ids.tolist()


def _withheld_choice(body: ChatBody | CompletionBody, index: int) -> dict[str, Any]:
    """A choice without text, and without log-probabilities, which would spell it."""
    message = {"role": "assistant", "content": None, "refusal": None}
    content: dict[str, Any] = {"message": message} if isinstance(body, ChatBody) else {"text": ""}
    return {"index": index, **content, "logprobs": None, "finish_reason": CONTENT_FILTER}


def _name_stops(choices: list[dict[str, Any]], request: Request) -> None:
    """Add the stop string that ended a choice to it, as vLLM does."""
    for choice in choices:
        stops = request.member_of(choice["index"]).watcher
        stop = stops.stop(choice["index"] % request.params.n) if isinstance(stops, StopWatchers) else None
        if stop is not None and choice["finish_reason"] == FinishReason.STOP:
            choice["stop_reason"] = stop


def _build_or_fail(row: ComputedRow, envelope: Envelope, make: Callable[[], list[ResultRow]]) -> list[ResultRow]:
    """The results of a row, or of its failure when they can't be built."""
    try:
        return make()
    except RowError as error:
        return _failed(row, error, envelope)
    except (JudgingInterrupted, MemoryError):  # it concerns the worker, not the row
        raise
    except Exception as error:  # noqa: BLE001 - it concerns one row
        name = f"{envelope.job}/{row.prepared.names[0].row}"
        return _failed(row, unforeseen(error, "a result could not be made", name), envelope)


def _with_tries(row: ComputedRow, results: list[ResultRow]) -> list[ResultRow]:
    return count_tries(results, row) if row.prepared.is_judged else results


def _with_report(rows: list[ResultRow], report: PolicyReport) -> list[ResultRow]:
    """The results of a row and of its copies, with the report of the content policies. Copies took no tokens."""
    if not report:
        return rows
    reports = [report, *[replace(report, prompt_tokens=0, completion_tokens=0)] * (len(rows) - 1)]
    return [
        replace(
            row,
            content_policies=orjson.dumps(each.fields).decode(),
            response=None
            if row.response is None
            else orjson.dumps(add_report(orjson.loads(row.response), each)).decode(),
        )
        for row, each in zip(rows, reports, strict=True)
    ]


def _failed(row: ComputedRow, error: RowError, envelope: Envelope) -> list[ResultRow]:
    prepared, completion = row.prepared, row.completion
    times = completion.started_at, completion.finished_at
    if prepared.dialect is not None:
        error = prepared.dialect.translate(error)
    return _refused(prepared.names, prepared.body.model, error, *times, envelope)


def _refused(
    names: Sequence[RowName], model: str, error: RowError, started_at: float, finished_at: float, envelope: Envelope
) -> list[ResultRow]:
    started, finished = envelope.wall(started_at), envelope.wall(finished_at)
    return [
        ResultRow.from_error(
            name.row,
            name.custom_id,
            error,
            model=model,
            created_at=envelope.created_at,
            started_at=started,
            finished_at=finished,
            attempt=envelope.attempt,
        )
        for name in names
    ]


def _usage(
    prepared: PreparedRow, completion: Completion, cached_tokens: int, truncated_tokens: int | None
) -> dict[str, Any]:
    details = {"cached_tokens": cached_tokens}
    if isinstance(prepared.body, ChatBody) and prepared.body.cache_breakpoints:
        details["cache_write_tokens"] = max(0, completion.retained_tokens - cached_tokens)
    if truncated_tokens is not None:
        details["truncated_tokens"] = truncated_tokens
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.generated_tokens,
        "total_tokens": completion.prompt_tokens + completion.generated_tokens,
        "prompt_tokens_details": details,
    }
