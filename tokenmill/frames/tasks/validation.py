"""Judges answers in Python: by a function of the caller, and by the validators of a pydantic model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from schemas.jobs.job import MAX_TRIES
from tokenmill.errors import InvalidCall
from tokenmill.frames.answers import AnswerForm, first_error
from tokenmill.frames.data.frame import Frame

DEFAULT_TRIES: Final = 3
"""Of a row, where answers are judged by a function."""

MAX_NAME_CHARS: Final = 256

CellsOf = Callable[[int], dict[str, Any]]
"""A row's cells by column, given its index."""

Validate = Callable[..., Any]
"""Takes an answer, and the row if it has a second parameter. The answer is accepted if it returns True or None."""


@dataclass(frozen=True, slots=True)
class Judging:
    """How the answers of a table are judged.

    Attributes:
        max_tries: of a row; None: answers are not judged before the job has ended.
        find_reason: why an answer is not accepted besides its form, given the cells of rows, the row and the text;
            None: its form alone counts.
        name: of what `find_reason` calls, for the job's record.
    """

    max_tries: int | None = None
    find_reason: Callable[[CellsOf, int, str], str | None] | None = None
    name: str | None = None

    def check_of(self, frame: Frame) -> Callable[[int, str], str | None] | None:
        """The check of answers to a frame's rows (`workers.settings.AnswerCheck`); None: there is none."""
        return self.check_with(lambda row: next(frame.slice(row, 1).cells(frame.columns)))

    def check_with(self, cells_of: CellsOf) -> Callable[[int, str], str | None] | None:
        """The same for rows of which only the cells are given."""
        return None if self.find_reason is None else partial(self.find_reason, cells_of)


NO_JUDGING: Final = Judging()


def judging(form: AnswerForm, validate: Validate | None, max_tries: int | None) -> Judging:
    """How the answers of a form are judged. Raises `InvalidCall`."""
    if max_tries is not None and (isinstance(max_tries, bool) or not isinstance(max_tries, int)):
        raise InvalidCall(f"max_tries: must be a whole number from 1 to {MAX_TRIES}, not {max_tries!r}")
    if max_tries is not None and not 1 <= max_tries <= MAX_TRIES:
        raise InvalidCall(f"max_tries: is {max_tries}, but must be from 1 to {MAX_TRIES}")
    if validate is None:
        if max_tries is None:
            return NO_JUDGING
        if form.is_text:
            raise InvalidCall(
                "max_tries: any text is an answer here; give validate or an output that answers must have"
            )
        if form.model is None:
            return Judging(max_tries)
    takes_row = validate is not None and _takes_row(validate)
    names = [form.model, None if validate is None else getattr(validate, "__qualname__", type(validate).__name__)]
    name = ", ".join(filter(None, names))[:MAX_NAME_CHARS]

    def find_reason(cells_of: CellsOf, row: int, text: str) -> str | None:
        try:
            answer = form.load(text)
        except ValueError as error:
            return str(error)
        if validate is None:
            return None
        given = (answer, cells_of(row)) if takes_row else (answer,)
        return _reason(validate, given)

    return Judging(DEFAULT_TRIES if max_tries is None else max_tries, find_reason, name)


def _takes_row(validate: Validate) -> bool:
    """Whether the function takes the row, too. Raises `InvalidCall` if it can't be called with an answer."""
    if not callable(validate):
        raise InvalidCall(f"validate: is a {type(validate).__name__}, but must be a function of the answer")
    if inspect.iscoroutinefunction(validate):
        raise InvalidCall("validate: is a coroutine function; give a plain one")
    try:
        signature = inspect.signature(validate)
    except ValueError:  # of some built-in functions
        return False
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [one for one in signature.parameters.values() if one.kind in kinds]
    takes_row = len(places) > 1 and (places[1].default is inspect.Parameter.empty or places[1].name == "row")
    try:
        signature.bind(*(None, None) if takes_row else (None,))
    except TypeError as error:
        raise InvalidCall(f"validate: must take the answer, or the answer and the row: {error}") from error
    return takes_row


def _reason(validate: Validate, given: tuple[Any, ...]) -> str | None:
    """Why the function doesn't accept the answer; None: it does."""
    try:
        found = validate(*given)
    except ValidationError as error:
        return first_error(error)
    except ValueError as error:
        return str(error) or "it is not valid"
    if found is None or isinstance(found, str):
        return found
    if type(found).__name__ in ("bool", "bool_"):  # numpy's and pandas' too
        return None if found else "it is not valid"
    from workers.settings import WrongVerdict

    message = f"validate must return True, None, False or a text, not a {type(found).__name__}"
    raise WrongVerdict(message, _place_of(validate))


def _place_of(validate: Validate) -> str:
    """The file and line of a function, or of a callable object's method; else its name."""
    for function in (validate, getattr(validate, "func", None), getattr(validate, "__call__", None)):  # noqa: B004
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if code is not None:
            return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return type(validate).__name__
