"""Counts what code does, so that a test sees how its cost grows without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(work: Callable[[], Any]) -> tuple[int, Any]:
    """Lines of Python that `work` executes, and what it returns."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = work()
    finally:
        sys.settrace(before)
    return count, found
