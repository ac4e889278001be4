"""The steps of a pipeline: calls that make a column each, and filters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmill.errors import InvalidCall
from tokenmill.frames.calls import DeferredCall
from tokenmill.frames.mapping import map_rows
from tokenmill.frames.options import engine_names
from tokenmill.frames.resident import Model
from tokenmill.frames.tasks.task import Task

Condition = Callable[[dict[str, Any]], Any]
"""Whether a row goes on, given its cells by column."""

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Of a step: it is the name of a folder, too."""

_OF_PIPELINE: Final = ("data", "output_column", "output_dir", "reuse", "dry_run")
"""Arguments of calls over tables that the pipeline has, or the step's name."""


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """A column that a call makes.

    Attributes:
        name: of the column, and the beginning of the other new columns' names.
        model: None: that of the pipeline.  engine: options of the engine, besides those of the pipeline.
    """

    name: str
    task: Task
    model: Model | None
    engine: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"step({self.name!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Filter:
    """Which rows go on to the steps behind it.

    Attributes:
        condition: the name of a column, or a function of the row's cells.  name: of either, for the pipeline's record.
    """

    condition: str | Condition
    name: str

    def __repr__(self) -> str:
        return f"filter({self.condition!r})" if isinstance(self.condition, str) else f"filter({self.name})"


def step(column: str, function: Callable[..., Any] = map_rows, /, **arguments: Any) -> Step:
    """A step of a pipeline: a new column of the table.

    Args:
        column: its name; that of `output_column` in a call of its own.
        function: `tokenmill.map`, `embed`, `classify` or `score`.
        **arguments: those of the function (`prompt`, `output`, `validate`, `temperature` and so on). Templates may use
            columns of the table, and those of steps before this one. `model` and the engine's options are the
            pipeline's if they are left out.

    Raises:
        InvalidCall: an argument can't be used.

    Example:
        >>> tm.step("grade", prompt="Is this right?\\n{{ answer }}", output=Literal["yes", "no"])  # doctest: +SKIP
        >>> tm.step("vector", tm.embed, column="answer", model="./all-MiniLM-L6-v2")  # doctest: +SKIP
    """
    if not isinstance(column, str) or not _NAME.fullmatch(column):
        raise InvalidCall(
            f"step: {column!r} can't be its name; give a column's name of letters, digits, '_', '-' and '.', since a "
            "folder has it, too"
        )
    for name in _OF_PIPELINE:
        if name in arguments:
            raise InvalidCall(f"{name}: is no argument of a step; the column's name comes first, the rest is run's")
    taken = DeferredCall()
    try:
        function(taken, **{"model": "", **arguments})
    except InvalidCall as error:
        raise InvalidCall(f"step {column!r}: {error}") from error
    except TypeError as error:  # a missing or unknown argument
        raise InvalidCall(f"step {column!r}: {error}") from error
    if not hasattr(taken, "task"):
        raise InvalidCall(f"step {column!r}: its function must be tokenmill.map, embed, classify or score")
    for name in taken.options.keys() - engine_names():
        raise InvalidCall(f"step {column!r}: {name}: a pipeline runs in this process; leave it out")
    return Step(column, taken.task, arguments.get("model"), taken.options)


def filter_rows(condition: str | Condition) -> Filter:
    """A filter of a pipeline: only rows for which the condition is true go on to the steps behind it. The others stay
    in the table; the columns of these steps are null there.

    Args:
        condition: the name of a column with truth values, or a function of the row, a dict of its cells with those of
            the steps before. It is called once or more for a row, and must say the same each time.

    Raises:
        InvalidCall: it is neither.

    Example:
        >>> tm.filter(lambda row: row["grade"] == "yes")  # doctest: +SKIP
    """
    if isinstance(condition, str):
        return Filter(condition, condition)
    if not callable(condition) or inspect.iscoroutinefunction(condition):
        raise InvalidCall("filter: must be the name of a column, or a plain function of the row")
    return Filter(condition, getattr(condition, "__qualname__", type(condition).__name__)[:256])
