"""What the job of a table would take, and what a user may not expect of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill import output
from tokenmill.frames.answer_schemas import AnswerBound
from tokenmill.frames.jobs.requests import FieldSharing
from tokenmill.local.pricing import NO_PRICE


@dataclass(frozen=True, slots=True)
class TableEstimate:
    """What a job would take, by the dry run that `tokenmill estimate` makes.

    Attributes:
        rows: of the table.  computed: without copies, which are answered once.
        prompt_tokens, shared_prefix_tokens: of all prompts; those of them that the prefix cache has.
        expected_tokens, max_tokens: of all answers.
        seconds: on this machine; None: unknown before 'tokenmill bench'.
        cost: of that time; None: unknown without the time, or without a price.  price_per_hour: None: unknown.
        sharing: what the order of `{% fields %}` saves; None without it.
        shared_as_written: `shared_prefix_tokens` if the fields had the template's order; None without them, and with
            `reuse`, whose answers are those of one order.
        max_tries: of a row; all other numbers are those of one try each. None: answers are not judged.
        reused: rows that take former answers, and are in none of the numbers behind `rows`; None: without `reuse`.
        notes: what may not be expected, each a line.
    """

    rows: int
    computed: int
    prompt_tokens: int
    shared_prefix_tokens: int
    expected_tokens: int
    max_tokens: int
    seconds: float | None
    cost: float | None
    sharing: FieldSharing | None = None
    shared_as_written: int | None = None
    max_tries: int | None = None
    reused: int | None = None
    notes: tuple[str, ...] = ()
    price_per_hour: float | None = None

    def __str__(self) -> str:
        reused = "" if self.reused is None else f", {self.reused:,} reused"
        lines = [f"rows             {self.rows:,} ({self.computed:,} computed{reused})"]
        lines.append(f"input tokens     {self.prompt_tokens:,}")
        lines.append(f"  shared         {self.shared_prefix_tokens:,}, read from the prefix cache, not computed again")
        if self.shared_as_written is not None:
            lines.append(f"  as written     {self.shared_as_written:,} shared if the fields had the template's order")
        lines.append(f"output tokens    {self.expected_tokens:,} expected, {self.max_tokens:,} at most")
        if self.max_tries is not None:
            lines.append(f"tries            1 a row in these numbers, {self.max_tries} at most")
        unknown = "unknown: 'tokenmill bench --model MODEL' measures it"
        lines.append(f"time here        {unknown if self.seconds is None else output.duration(self.seconds)}")
        unknown = f"unknown: {NO_PRICE}" if self.price_per_hour is None else "unknown, as the time is"
        lines.append(f"cost             {unknown if self.cost is None else format(self.cost, '.4f')}")
        lines += [f"note             {note}" for note in self.notes]
        return "\n".join(lines)


def length_notes(bound: AnswerBound | None, body: Mapping[str, Any], limit: Callable[[], int]) -> list[str]:
    """A note where nothing bounds an answer but `limit()`, the most tokens of one without `max_tokens`."""
    if bound is None or not bound.unbounded or {"max_tokens", "max_completion_tokens"} & body.keys():
        return []
    names = ", ".join(bound.unbounded[:5]) + (", …" if len(bound.unbounded) > 5 else "")
    return [f"max_tokens is not given: an answer may have {limit():,} tokens, as {names} has no bound"]
