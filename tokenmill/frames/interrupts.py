"""Ctrl-C in calls over tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def interrupts_plainly(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose `KeyboardInterrupt` has the caller's lines and the message: where the call was is of no use."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) from None

    return call
