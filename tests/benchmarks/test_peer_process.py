"""An engine in a process of its own: its memory with its children's, its time limit, its processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers import process
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MB = 1_000_000


def run(code: str, tmp_path: Path, limit: float = 60, **env: str) -> process.Finished:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    return process.run([sys.executable, "-c", code], tmp_path / "it.log", limit=limit, cpus=cpus, env=env)


def test_output_and_exit_status_come_back(tmp_path: Path) -> None:
    done = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path)

    assert (done.returncode, done.stdout, done.log) == (3, "out\n", "err\n")


@pytest.mark.slow
def test_memory_is_that_of_the_whole_tree(tmp_path: Path) -> None:
    """Given a parent of 100 MB and a child of 200 MB at the same time, at least their sum is counted."""
    child = "import time; held = b'x' * 200_000_000; time.sleep(1)"
    code = f"import subprocess, sys; held = b'x' * 100_000_000; subprocess.run([sys.executable, '-c', {child!r}])"

    done = run(code, tmp_path)

    assert done.returncode == 0
    assert 300 * MB < done.peak_rss_bytes < 400 * MB


@pytest.mark.slow
def test_a_peak_between_two_polls_is_not_missed(tmp_path: Path) -> None:
    """Given 300 MB held for a moment only, the kernel's high-water mark still shows it."""
    done = run("import time; held = b'x' * 300_000_000; del held; time.sleep(1)", tmp_path)

    assert done.peak_rss_bytes > 300 * MB


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_time_limit_ends_the_whole_tree(tmp_path: Path) -> None:
    """Given an engine whose worker has a session of its own, nothing of it outlives the limit."""
    note = tmp_path / "worker"
    worker = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep({2 * HANG_SECONDS})"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True); "
        "time.sleep(60)"
    )

    done = run(code, tmp_path, limit=8)  # in which a busy machine starts both

    assert done.returncode is None
    pid = int(note.read_text())
    state = Path(f"/proc/{pid}/stat")
    wait_for(
        lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "the worker lives on"
    )


def test_every_engine_gets_its_configured_processors_and_no_settings_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'), os.environ['MINE'])"

    done = run(code, tmp_path, MINE="set")

    assert done.stdout == f"{sorted(os.sched_getaffinity(0))[:1]} None set\n"


@pytest.mark.slow
def test_work_of_other_processes_is_separated_from_the_engines_own(tmp_path: Path) -> None:
    """Given an engine whose worker computes and is never waited for, others are charged with all but its work.

    Whatever else runs on this machine: what was busy and isn't the others' is at least what the worker reports.
    """
    report = tmp_path / "report"
    worker = f"""
import time
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
open({str(report)!r}, "w").write(str(time.process_time()))
time.sleep(1)
"""
    code = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(2.3)"
    before = process.busy_seconds()

    done = run(f"{code}; os._exit(0)", tmp_path)

    busy = process.busy_seconds() - before
    spent = float(report.read_text())
    assert spent > 0
    assert busy - done.others * done.seconds > 0.8 * spent
    assert done.others * done.seconds >= busy - spent - 1  # and with nothing else: start-up takes part of a second
