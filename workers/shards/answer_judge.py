"""Judges the answers of a job with `max_tries`: a row whose answer is not accepted is asked again.

The judge is called between two steps of the engine, so the row's next try is in the queue before anything else can take
the blocks of its prompt. An answer is judged by its form, then by the job's own check, if there is one.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from engine.request import FinishReason
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.checkpoints import FormerTry
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import ChatBody
from workers.rows import ComputedRow, PreparedRow
from workers.settings import AnswerCheck, WrongVerdict
from workers.shards.shard_reader import ShardReader
from workers.structured.form_check import check_form
from workers.translation.responses import ResponseBuilder, failure_of
from workers.translation.tries import error_of_refused_retry, usage_of

MAX_REASON_CHARS: Final = 2_000
"""Of what a model is told about its answer."""

LIBRARIES: Final = sys.stdlib_module_names | {"workers", "tokenmill", "pydantic"}
"""Modules that call or are called by a check, and are not the place of its mistake."""

logger = structlog.get_logger(__name__)


class _CheckFailures:
    """The failures of one worker's checks, of which the log has the first one of each kind and place."""

    def __init__(self) -> None:
        self._rows: Counter[tuple[str, str]] = Counter()

    def add(self, error: Exception, row: str) -> RowError:
        """The error of a row whose answer can't be judged. `row`: its name, for the log."""
        kind = "TypeError" if isinstance(error, WrongVerdict) else type(error).__name__
        place, reason = _place(error), _bounded(str(error))
        if (kind, place) not in self._rows:
            logger.error("the check of an answer failed", error=kind, at=place, reason=reason, row=row)
        self._rows[kind, place] += 1
        return RowError(
            RowErrorCode.INVALID_ANSWER, f"its check failed with {kind} at {place}, so it can't be accepted: {reason}"
        )  # fmt: skip

    def log_totals(self) -> None:
        """Log how many rows each mistake failed, where they are several."""
        for (kind, place), rows in self._rows.items():
            if rows > 1:
                logger.error("the check of answers failed", error=kind, at=place, rows=rows)
        self._rows.clear()


class AnswerJudge:
    """Judges the answers of one worker. Only its loop calls it.

    Args:
        check_of: a job's own check, after that of the form, by the job's id; None: it has none.
    """

    def __init__(
        self, reader: ShardReader, builder: ResponseBuilder, check_of: Callable[[str], AnswerCheck | None]
    ) -> None:
        self._reader = reader
        self._builder = builder
        self._check_of = check_of
        self._failures = _CheckFailures()

    def judge(self, work: ShardWork, row: ComputedRow) -> ComputedRow | PreparedRow:
        """The row with its outcome, or as it is to be asked again."""
        prepared = row.prepared
        if not prepared.is_judged or failure_of(row.completion) is not None:
            return row
        try:
            text = self._builder.content(row)
        except Exception as error:  # noqa: BLE001 - the result of this row can't be built either, and says why
            logger.warning("an answer can't be decoded", row=_name(work, prepared), error=type(error).__name__)
            return row
        reasons: dict[int, str] = {}
        rejected: dict[int, RowError] = {}
        for name in prepared.names:
            wrong = self._judged(row, name.row, text, work, reasons)
            if wrong is not None:
                rejected[name.row] = wrong
        if not rejected:
            return row
        max_tries = work.job.settings.max_tries or 1
        if not reasons or len(prepared.tries) + 1 >= max_tries:
            return ComputedRow(prepared, row.completion, row.withheld, rejected)
        former = FormerTry(text, next(iter(reasons.values())), usage_of(row.completion))
        try:
            return self._reader.ask_again(work, prepared, former)
        except RowError as error:  # the longer prompt exceeds the context, or the template takes no such turns
            refused = error_of_refused_retry((former,), error)
            return ComputedRow(prepared, row.completion, row.withheld, dict.fromkeys(rejected, refused))

    def log_failures(self) -> None:
        """Log how many rows the mistakes in checks failed."""
        self._failures.log_totals()

    def _judged(
        self, row: ComputedRow, index: int, text: str, work: ShardWork, reasons: dict[int, str]
    ) -> RowError | None:
        """Why the answer is not accepted for a row or a copy; None: it is. `reasons` gets it, if the row may be asked
        again."""
        body = row.prepared.body
        assert isinstance(body, ChatBody), "only chats are judged"
        (choice,) = row.completion.choices
        try:
            error = find_rejection(
                body, index, text, self._check_of(work.job.id), is_cut_off=choice.finish_reason is FinishReason.LENGTH
            )
        except MemoryError:
            raise
        except Exception as raised:  # noqa: BLE001 - a mistake in the check is the row's error, not the job's end
            return self._failures.add(raised, _name(work, row.prepared))
        if error is not None:
            reasons[index] = error.message
        return error


def find_rejection(
    body: ChatBody, row: int, text: str, check: AnswerCheck | None, *, is_cut_off: bool
) -> RowError | None:
    """Why the answer of a row is not accepted; None: it is. Raises what `check` raises.

    Args:
        is_cut_off: it has reached `max_tokens`.
    """
    error = check_form(body, text, is_cut_off=is_cut_off)
    if error is None and check is not None and (reason := check(row, text)) is not None:
        error = RowError(RowErrorCode.INVALID_ANSWER, reason)
    return None if error is None else RowError(error.code, _bounded(error.message))


def _bounded(reason: str) -> str:
    """The reason as a text of bounded length that can be encoded."""
    text = reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}…"
    return text.encode(errors="replace").decode()


def _place(error: Exception) -> str:
    """The file and line of the caller's code that raised the error, or that called a library that did."""
    if isinstance(error, WrongVerdict):
        return error.place
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [
        (frame, line)
        for frame, line in frames
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES
        and "site-packages" not in frame.f_code.co_filename
    ]
    frame, line = (own or frames)[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _name(work: ShardWork, row: PreparedRow) -> str:
    return f"{work.job.id}/{row.names[0].row}"
