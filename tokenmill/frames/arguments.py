"""The arguments of calls over tables by name. Errors name the argument and the fix, in the names that users write."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from tokenmill.errors import InvalidCall
from tokenmill.frames.options import ELSEWHERE

P = ParamSpec("P")
R = TypeVar("R")


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose missing and surplus arguments raise the errors of `name_arguments`."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        named: Callable[..., R] = function
        return named(**name_arguments(function, args, keywords))

    return call


def name_arguments(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name. Raises `TypeError` if one is missing or has no name that needs one, and
    `InvalidCall` for a misspelt one in place of one that is missing."""
    call = function.__name__.removesuffix("_rows")
    known = inspect.signature(function).parameters
    places = [one.name for one in known.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places):
        named = [f"{one.name}=" for one in known.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        raise TypeError(
            f"{call}: takes {' and '.join(places)} without a name, and all others by name: {', '.join(named)} …"
        )
    given = dict(zip(places, args, strict=False))
    for name in given.keys() & keywords.keys():
        raise TypeError(f"{call}: {name} is given twice, in its place and by name")
    given |= keywords
    needed = [one.name for one in known.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    missing = [name for name in needed if name not in given]
    for name in keywords:
        if name not in known and missing:
            near = [ELSEWHERE.get(name, "")] if ELSEWHERE.get(name) in missing else []
            if near := near or difflib.get_close_matches(name, missing, n=1):
                raise InvalidCall(f"{name}: is no parameter; did you mean {near[0]}?")
    if missing:
        raise TypeError(f"{call}: lacks {' and '.join(missing)}; give {', '.join(f'{name}=...' for name in missing)}")
    return given
