"""The watchdog ends a stuck worker with its stack traces, and never one that makes progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_SECONDS

SCRIPT = """
import sys, time
from workers.observability.watchdog import Watchdog

def kernel_that_never_returns():
    time.sleep(60)

watchdog = Watchdog(0.5)
with watchdog.watching():
    for _ in range(20):
        time.sleep(0.1)
        watchdog.progress(None)
    print("worked", flush=True)
    if sys.argv[1] == "stuck":
        kernel_that_never_returns()
time.sleep(1.2)
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["stuck", "well"])
@pytest.mark.slow
def test_only_a_silent_worker_is_ended(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=Path(__file__).parents[3],
    )
    if how == "well":
        assert (done.returncode, done.stdout) == (0, "worked\nended\n")
    else:
        assert done.returncode == 70
        assert done.stdout.startswith("worked\n")
        assert "ended" not in done.stdout
        assert "the engine is stuck" in done.stdout + done.stderr
        assert "in kernel_that_never_returns" in done.stderr
