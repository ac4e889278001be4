"""The steps of a cascade: which rows the next model answers, as a pure function of the jobs that have ended.

Each step is a job of its own, a retry of the first one. So parts stay final, and a step that is computed again after a
crash selects the same rows.

The threshold of the log-probability may be chosen so that the cascade gives the next model's answer to a stated share
of the rows (selective classification; for language models Gupta et al. 2024, "Language Model Cascades", section 3). The
next model answers a sample; the threshold is the lowest at which the lower confidence bound of that share (Wilson 1927)
is high enough. Rows below it count as agreeing, because the next model answers them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.jobs.retry import LINE_REFUSALS, RETRIED
from pipeline.ledger.ledger import JobLedger, part_key
from schemas.jobs.cascade_outcome import CascadeOutcome, CascadeStep
from schemas.jobs.outcome import Manifest
from schemas.jobs.row_selection import RowSelection
from schemas.requests.policy_report import EXTENSION, FIELD, is_routed

UNANSWERED: Final = "unanswered"
ROUTED: Final = "routed"
LOGPROB: Final = "min_mean_logprob"
SAMPLED: Final = "sampled"
"""Why a row isn't final that passes all checks: the next model has answered it for the sample."""

_CONFIDENCE_Z: Final = 1.2816
"""One-sided 90 %."""

_COLUMNS: Final = ["row", "status", "error_code", "text", "finish_reason", "content_policies"]
_BATCH_ROWS: Final = 4_096

Check = Callable[[str, str | None], str | None]
"""Takes an answer's text and finish reason; returns the name of the first check that it fails, or None."""


@dataclass(slots=True)
class StepAnswers:
    """A step's rows after the checks of its answers.

    Attributes:
        rejected: row -> the check that it fails; lines that every model refuses are not in it.
        logprobs: row -> mean log-probability of an answer that passed the other checks (nan: unknown).
        texts: row -> that answer (`comparable`).
        rows: number of rows.  refused: of them, lines that every model refuses.
    """

    rejected: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    rows: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold chosen on a sample. `value` None: every row goes to the next model."""

    value: float | None
    agreement: float
    sampled_rows: int


def read_answers(
    ledger: JobLedger, check: Check, *, wants_logprobs: bool = False, wants_texts: bool = False
) -> StepAnswers:
    """Read the answers of an ended job. Memory grows with the number of rows that fail, with `wants_logprobs` of all
    rows, and with `wants_texts` with their texts.

    Raises:
        ResultsRemoved: they are removed.
    """
    ledger.check_results()
    found = StepAnswers()
    for number, _ in ledger.parts():
        with ledger.store.open(ledger.prefix + part_key(number)) as stream:
            columns = [*_COLUMNS, "response"] if wants_logprobs or wants_texts else _COLUMNS
            for batch in pq.ParquetFile(stream).iter_batches(_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    _add(found, row, check, wants_texts=wants_texts)
    return found


def _add(found: StepAnswers, row: dict[str, Any], check: Check, *, wants_texts: bool) -> None:
    number = row["row"]
    found.rows += 1
    if row["status"] in RETRIED:
        if row["error_code"] in LINE_REFUSALS:
            found.refused += 1
        else:
            report = orjson.loads(row["content_policies"] or "{}")
            found.rejected[number] = ROUTED if is_routed({EXTENSION: {FIELD: report}}) else UNANSWERED
        return
    text = row["text"] or ""
    failed = check(text, row["finish_reason"])
    if failed is not None:
        found.rejected[number] = failed
        return
    if "response" not in row:
        return
    response = orjson.loads(row["response"] or "{}")
    found.logprobs[number] = mean_logprob(response)
    if wants_texts:
        found.texts[number] = comparable(text, response)


def comparable(text: str, response: dict[str, Any]) -> str:
    """What of an answer is compared: its text, and the names and arguments of its tool calls."""
    message = (response.get("choices") or [{}])[0].get("message") or {}
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return text + orjson.dumps(calls).decode() if calls else text


def mean_logprob(response: dict[str, Any]) -> float:
    """The mean log-probability of the tokens of a response's first choice, in nats; nan: it has none."""
    choices = response.get("choices") or [{}]
    logprobs = choices[0].get("logprobs") or {}
    content = logprobs.get("content")
    values = logprobs.get("token_logprobs") or [] if content is None else [token["logprob"] for token in content]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def sample_rows(answers: StepAnswers, count: int) -> list[int]:
    """Rows that passed the checks, drawn at random but the same each time."""
    rows = np.array(sorted(answers.logprobs), dtype=np.int64)
    drawn = np.random.default_rng(0).permutation(len(rows))[:count]
    return sorted(rows[drawn].tolist())


def choose_threshold(small: StepAnswers, large: StepAnswers, agreement: float) -> Threshold:
    """The lowest threshold at which the cascade agrees with the larger model on the rows that both answered.

    Args:
        small, large: read with texts; rows that the larger model left unanswered are not compared.
        agreement: least lower confidence bound of the share of equal answers.
    """
    compared = sorted(
        ((small.logprobs[row], equal(small.texts[row], text)) for row, text in large.texts.items()),
        key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0],
        reverse=True,
    )
    count = len(compared)
    wrong, chosen, agreed = 0, None, 1.0
    for at, (logprob, is_equal) in enumerate(compared):
        wrong += not is_equal
        if at + 1 < count and compared[at + 1][0] == logprob:
            continue  # a threshold accepts all or none of them
        if math.isnan(logprob) or wilson_lower_bound(count - wrong, count) < agreement:
            break
        chosen, agreed = logprob, (count - wrong) / count
    return Threshold(chosen, agreed, count)


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same: the same JSON, or the same text apart from white space around it."""
    if one.strip() == other.strip():
        return True
    try:  # as bytes: 1 and true differ
        return canonical(one) == canonical(other)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):  # no JSON, or too deep
        return False


def canonical(text: str) -> bytes:
    """A JSON text in one form. Raises `orjson.JSONDecodeError`, and `orjson.JSONEncodeError` for a deep one."""
    return orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS)


def wilson_lower_bound(successes: int, count: int) -> float:
    """The lower bound of a share (Wilson 1927, one-sided 90 %)."""
    if not count:
        return 0.0
    share, z2 = successes / count, _CONFIDENCE_Z**2
    spread = _CONFIDENCE_Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, (share + z2 / (2 * count) - spread) / (1 + z2 / count))


def reject_below(answers: StepAnswers, least: float | None) -> None:
    """Reject answers whose mean log-probability is below `least` (None: all), or unknown."""
    for row, value in answers.logprobs.items():
        if least is None or not value >= least:
            answers.rejected.setdefault(row, LOGPROB)


def selection_of(rows: Sequence[int]) -> RowSelection | None:
    """A selection of these rows; None: there are none."""
    if not rows:
        return None
    mask: NDArray[np.bool_] = np.zeros(max(rows) + 1, dtype=np.bool_)
    mask[list(rows)] = True
    return RowSelection.of(mask)


def describe_step(manifest: Manifest, model: str, answers: StepAnswers) -> CascadeStep:
    """The step's entry in the outcome."""
    return CascadeStep(
        job=manifest.job,
        model=model,
        rows=answers.rows,
        accepted=answers.rows - answers.refused - len(answers.rejected),
        rejected=dict(sorted(Counter(answers.rejected.values()).items())),
        usage=manifest.usage,
        busy_seconds=manifest.busy_seconds,
        cost=manifest.cost,
    )


def outcome_of(steps: Sequence[CascadeStep], last_model: str, threshold: Threshold | None) -> CascadeOutcome:
    """The outcome of a cascade whose last model is `last_model`."""
    rows = steps[0].rows
    busy = sum(step.busy_seconds for step in steps)
    costs = [step.cost for step in steps]
    cost = None if None in costs else sum(value for value in costs if value is not None)
    last = [step for step in steps if step.model == last_model]
    answered = sum(step.rows for step in last)
    alone = sum(step.busy_seconds for step in last) / answered * rows if answered else None
    alone_cost = None
    if answered and cost is not None:
        alone_cost = sum(step.cost or 0.0 for step in last) / answered * rows
    return CascadeOutcome(
        steps=tuple(steps),
        min_mean_logprob=None if threshold is None else threshold.value,
        sampled_rows=0 if threshold is None else threshold.sampled_rows,
        agreement=None if threshold is None else threshold.agreement,
        busy_seconds=busy,
        cost=cost,
        saved_busy_seconds=None if alone is None else alone - busy,
        saved_cost=None if alone_cost is None or cost is None else alone_cost - cost,
    )
