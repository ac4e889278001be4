"""Resumes rows: converts logged choices to the engine's partial choices, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import structlog

from engine.errors import RequestRefused
from engine.groups import ended_choice
from engine.request import Completion, FinishReason, PartialChoice, Request, TokenLogprobs
from engine.scheduler.resume import check_partial
from engine.step_engine import StepEngine
from schemas.jobs.checkpoints import LoggedChoice, LoggedLogprobs
from workers.rows import PreparedRow
from workers.translation.requests import StopWatchers

logger = structlog.get_logger(__name__)


def resume(engine: StepEngine, request: Request, logged: Iterable[LoggedChoice]) -> Request:
    """The request, resumed from its logged choices; unchanged (with a warning in the log) when these don't fit it."""
    return resume_from(engine, request, tuple(_partial(request, choice) for choice in logged))


def resume_failed(engine: StepEngine, row: PreparedRow, completion: Completion) -> PreparedRow:
    """The row, resumed from the tokens that its choices had when a step with it failed."""
    return replace(row, request=resume_from(engine, row.request, tuple(unfinished(completion))))


def unfinished(completion: Completion, given: Mapping[int, int] | None = None) -> list[PartialChoice]:
    """The choices of a request that a failed step removed from the engine, as `Engine.partial` returns them.

    `given`: choice -> tokens to leave out at its beginning.
    """
    choices = [ended_choice(choice, (given or {}).get(choice.index, 0)) for choice in completion.choices]
    return [choice for choice in choices if len(choice.token_ids) or choice.finish_reason is not None]


def resume_from(engine: StepEngine, request: Request, partial: tuple[PartialChoice, ...]) -> Request:
    """The request, resumed from these choices; unchanged when the engine does not resume it, or (with a warning in the
    log) when these don't fit it."""
    if not engine.resumes(request):
        return replace(request, partial=())
    partial = tuple(choice for choice in partial if not _scores_prompt(request, choice))
    resumed = replace(request, partial=partial)
    try:
        check_partial(resumed)
    except RequestRefused as error:
        logger.warning("logged choices don't fit their row: the row is computed again", why=str(error))
        return request
    for choice in partial:  # only the watcher has the text of a choice that a stop string ended
        watchers = request.member_of(choice.index).watcher
        is_stopped = choice.finish_reason is FinishReason.STOP and choice.stop_token_id is None
        if is_stopped and isinstance(watchers, StopWatchers):
            watcher = watchers(choice.index % request.params.n)
            for token_id in choice.token_ids.tolist():
                watcher.push(token_id)
    return resumed


def _scores_prompt(request: Request, choice: PartialChoice) -> bool:
    """Whether this ended choice is computed again because it returns the log-probabilities of its prompt."""
    params = request.member_of(choice.index).params
    is_first = choice.index % params.n == 0
    return choice.finish_reason is not None and (
        not params.max_tokens or (is_first and params.prompt_logprobs is not None)
    )


def logged_choice(row: PreparedRow, start: int, partial: PartialChoice) -> LoggedChoice:
    """The log record of a choice; its first token is at index `start` of the answer."""
    given = partial.logprobs
    return LoggedChoice(
        row=row.names[0].row,
        choice=partial.index,
        start=start,
        token_ids=partial.token_ids,
        finish_reason=None if partial.finish_reason is None else partial.finish_reason.value,
        stop_token_id=partial.stop_token_id,
        logprobs=None if given is None else LoggedLogprobs(given.chosen, given.top_ids, given.top),
        tries=() if start else row.tries,
    )


def _partial(request: Request, logged: LoggedChoice) -> PartialChoice:
    logprobs = None
    if request.params.logprobs is not None:
        top, given = request.params.logprobs, logged.logprobs
        if given is not None:
            logprobs = TokenLogprobs(given.chosen, given.top_ids, given.top)
        elif not len(logged.token_ids):
            empty = np.zeros((0, top))
            logprobs = TokenLogprobs(np.zeros(0, np.float32), empty.astype(np.int32), empty.astype(np.float32))
    return PartialChoice(
        index=logged.choice,
        token_ids=logged.token_ids,
        logprobs=logprobs,
        finish_reason=None if logged.finish_reason is None else FinishReason(logged.finish_reason),
        stop_token_id=logged.stop_token_id,
    )
