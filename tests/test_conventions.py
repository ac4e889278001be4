"""Conventions of the tests themselves."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.syntax import parsed

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}


def limits_time(node: ast.Assert) -> bool:
    """Whether the assertion compares a clock's reading with an upper bound: `clock() - began < 2`."""
    compared = node.test
    if not isinstance(compared, ast.Compare) or not any(isinstance(op, ast.Lt | ast.LtE) for op in compared.ops):
        return False
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Sub)
        and any(
            isinstance(call, ast.Call) and ast.unparse(call.func) in {f"time.{name}" for name in CLOCKS} | CLOCKS
            for call in ast.walk(part)
        )
        for part in [compared.left, *compared.comparators[:-1]]
    )


def test_no_test_asserts_how_long_something_took() -> None:
    """A busy machine would fail it; benchmarks measure time, and `tests/waiting.py` guards against hanging."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert) and limits_time(node)
    ]
    assert found == []


def test_an_assertion_on_elapsed_time_is_found() -> None:
    (bad, good) = ast.parse("assert time.monotonic() - began < 2\nassert time.monotonic() < until").body
    assert isinstance(bad, ast.Assert)
    assert limits_time(bad)
    assert isinstance(good, ast.Assert)
    assert not limits_time(good)
