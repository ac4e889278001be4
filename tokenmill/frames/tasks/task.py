"""The parts that all tasks have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from tokenmill.frames.answer_schemas import AnswerBound
from tokenmill.frames.prompts import RowText
from tokenmill.frames.tasks.validation import NO_JUDGING, Judging

if TYPE_CHECKING:
    from schemas.requests.parsing import Body
    from workers.text.chat_options import ChatOptions

USAGE: Final = ("_prompt_tokens", "_cached_tokens")
ORIGIN: Final = ("_key", "_reused")


@dataclass(frozen=True, slots=True)
class FormerAnswer:
    """What a result says, made from the cells of a table.

    Attributes:
        response: the body as JSON, with the one answer.  text, embedding: as `ResultRow` has them.
    """

    response: dict[str, Any]
    text: str | None = None
    finish_reason: str | None = None
    embedding: list[float] | None = None


class Answers(Protocol):
    """The columns of a task's answers."""

    @property
    def former(self) -> tuple[str, ...]:
        """The suffixes of the columns that a former answer is made from; "" is the first."""
        ...

    def columns(self, results: pa.Table, errors: list[str | None]) -> dict[str, pa.Array]:
        """The columns by suffix.

        Args:
            results: the results' columns that the task names; without rows too.
            errors: of rows that failed; those of answers that can't be used are added.
        """
        ...

    def former_answer(self, cells: Mapping[str, Any]) -> FormerAnswer | None:
        """The result that has these cells, by suffix; None: no result does, or not all of it is in the cells."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked about each row.

    Attributes:
        url: of the requests.
        texts: what is rendered for each row, by the argument that it is.
        request: the fields of a request that hold a row's texts.
        body: the other fields, but for the model.
        suffixes: of the new columns' names, in their order. Each is of the answers, or one that every task may have.
        results: columns of the results that the answers are made from.
        answers: makes the answers' columns for the model at a path, and takes a parsed request. Raises `InvalidCall` if
            the model can't give such answers.
        answers_from: makes them from the results alone, for a model whose files are elsewhere.
        ordered: the text that may have `{% fields %}`; None: none may.
        chat: replaces the model's own template; None: it doesn't.
        judging: how answers are judged before their rows end.
        adapter_column: the column with the name of the adapter that answers each row; None: all rows have the same.
        bound: how long an answer is that the model writes; None: it writes none.
    """

    url: str
    texts: Mapping[str, RowText]
    request: Callable[[Mapping[str, str]], dict[str, Any]]
    body: Mapping[str, Any]
    suffixes: tuple[str, ...]
    results: tuple[str, ...]
    answers: Callable[[Path, Body], Answers]
    answers_from: Callable[[pa.Table], Answers]
    ordered: str | None = None
    chat: ChatOptions | None = field(default=None)
    judging: Judging = NO_JUDGING
    adapter_column: str | None = None
    bound: AnswerBound | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that requests are made from, sorted."""
        used = {column for text in self.texts.values() for column in text.columns}
        return tuple(sorted(used if self.adapter_column is None else used | {self.adapter_column}))
