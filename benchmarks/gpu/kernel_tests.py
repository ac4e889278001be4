"""A pytest plugin for machines that are lent for minutes: each failure is written to $KERNEL_TESTS as it comes, and a
test process whose device is lost ends, so that its other tests run in a new one.

    python -m pytest -p benchmarks.gpu.kernel_tests -n 12 tests/engine/triton
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

LOST = ("CUDA error", "illegal memory access")
"""Of what a device says that computes no more in this process."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    """Write a failed phase of a test down."""
    report = (yield).get_result()
    if not report.failed:
        return
    with open(os.environ["KERNEL_TESTS"], "a", encoding="utf-8") as file:
        file.write(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}\n\n")
    if call.excinfo is not None and any(each in str(call.excinfo.value) for each in LOST):
        os._exit(3)  # pytest-xdist starts another process
