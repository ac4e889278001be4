"""Tries of a row whose answers must be accepted: the longer conversation in which it is asked again, and results that
count all of its tries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import orjson

from engine.request import Completion
from schemas.jobs.checkpoints import FormerTry
from schemas.jobs.outcome import Usage
from schemas.jobs.results import ResultRow
from schemas.requests.bodies import ChatMessage
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody
from workers.rows import ComputedRow, RejectedRow


def body_of_retry(body: ChatBody, tries: Iterable[FormerTry]) -> ChatBody:
    """The request behind these tries: each answer, and why it was not accepted, follow the messages, which stay as they
    are. So the prompt begins with the tokens of the former one, whose blocks are in the prefix cache."""
    turns: list[ChatMessage] = []
    for one in tries:
        turns.append(ChatMessage(role="assistant", content=one.text))
        turns.append(ChatMessage(role="user", content=f"The answer is not accepted: {one.error}\nAnswer again."))
    return body.model_copy(update={"messages": (*body.messages, *turns)})


def usage_of(completion: Completion) -> Usage:
    """The tokens of a request."""
    return Usage(
        prompt=completion.prompt_tokens,
        cached=completion.cached_tokens,
        completion=completion.generated_tokens,
        drafted=completion.drafted_tokens,
        accepted=completion.accepted_tokens,
    )


def total_usage(tries: Iterable[FormerTry], last: Usage | None = None) -> Usage:
    """The tokens of all tries; `last`: of the one after them."""
    total = Usage() if last is None else last
    for one in tries:
        total += one.usage
    return total


def error_of_refused_retry(tries: Sequence[FormerTry], refusal: RowError) -> RowError:
    """The error of a row that can't be asked again after these tries; without any it is the refusal itself."""
    if not tries:
        return refusal
    return RowError(RowErrorCode.INVALID_ANSWER, f"{tries[-1].error} (asked no more: {refusal.message})")


def count_tries(results: Sequence[ResultRow], row: ComputedRow) -> list[ResultRow]:
    """The results of a row that is judged, and of its copies, with the tokens of all tries. Those whose answer is not
    accepted fail, and have the tokens too."""
    prepared = row.prepared
    total = total_usage(prepared.tries, usage_of(row.completion))
    return [
        _counted(result, row, total, len(prepared.tries) + 1, is_copy=index > 0) for index, result in enumerate(results)
    ]


def count_former_tries(results: Iterable[ResultRow], row: RejectedRow) -> list[ResultRow]:
    """The results of a row that the engine refused to compute again, and of its copies."""
    if not row.tries:
        return list(results)
    total = total_usage(row.tries)
    return [
        _with_tokens(replace(result, tries=len(row.tries)), total, is_copy=index > 0)
        for index, result in enumerate(results)
    ]


def _counted(result: ResultRow, row: ComputedRow, total: Usage, tries: int, *, is_copy: bool) -> ResultRow:
    result = replace(result, tries=tries)
    error = row.rejected.get(result.row)
    if error is not None:
        failed = ResultRow.from_error(
            result.row, result.custom_id, error, model=result.model, created_at=result.created_at,
            started_at=result.started_at, finished_at=result.finished_at, attempt=result.attempt,
        )  # fmt: skip
        failed = replace(failed, finish_reason=result.finish_reason, tries=tries)
        return _with_tokens(failed, total, is_copy=is_copy)
    return _with_tokens(result, total, is_copy=is_copy) if row.prepared.tries else result


def _with_tokens(result: ResultRow, total: Usage, *, is_copy: bool) -> ResultRow:
    """The result with these tokens, and its response too. A copy has its whole prompts cached."""
    cached = total.prompt if is_copy else total.cached
    response = result.response
    if response is not None:
        document = orjson.loads(response)
        usage = document["usage"]
        usage["prompt_tokens"], usage["completion_tokens"] = total.prompt, total.completion
        usage["total_tokens"] = total.prompt + total.completion
        usage["prompt_tokens_details"]["cached_tokens"] = cached
        response = orjson.dumps(document).decode()
    return replace(
        result, response=response, prompt_tokens=total.prompt, cached_tokens=cached,
        completion_tokens=total.completion,
    )  # fmt: skip
