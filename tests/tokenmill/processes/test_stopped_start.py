"""SIGTERM while a long-running command starts: it ends soon and in order, with exit code 0, whatever it was about."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
LONGEST = 4.0
"""Seconds in which a start is over on most machines."""
RAISED = "signal.raise_signal(signal.SIGTERM)"
WRAPPED = """
class SignalOnSetName:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGTERM)
class Owner:
    attribute = SignalOnSetName()
"""
"""Python 3.11 replaces an exception of `__set_name__` by a RuntimeError."""
FINALIZED = """
class SignalOnDelete:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
SignalOnDelete()
"""
"""Python swallows an exception of a finalizer, and prints a traceback."""
PARTS = ("serve", "worker", "dispatcher", "intake", "gateway")

STOP_AT_EVENT = """
import runpy, signal, sys
def stop_at_event(event, details):
    if event == {event!r} and (not {name!r} or details[0] == {name!r}) and not done:
        done.append(event)
        exec({how!r}, globals())
done = []
sys.addaudithook(stop_at_event)
runpy.run_module("tokenmill", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def arguments(folder: Path, model_folder: Path) -> Callable[[str], list[str]]:
    """A command with all that it needs."""
    engine = ["--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1"]

    def make(part: str) -> list[str]:
        where = ["--data", "root"] if part == "serve" else ["--root", "root"]
        port = ["--port", "0"] if part in ("serve", "gateway") else []
        return [part, *where, *port, *(engine if part in ("serve", "worker") else [])]

    return make


@pytest.fixture
def variables(folder: Path, redis_server: RedisServer) -> dict[str, str]:
    (folder / "root").mkdir()
    return {
        **os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1",
        "TOKENMILL_REDIS_URL": redis_server.url, "TOKENMILL_CELERY__QUEUES": '{"tokenmill": "default"}',
    }  # fmt: skip


@pytest.fixture
def start(folder: Path, variables: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a program in a session of its own; its log is at `folder / "log"`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*program: str) -> subprocess.Popen[bytes]:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *program], cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_end(process: subprocess.Popen[bytes], folder: Path) -> str:
    """It ends gracefully, and leaves no process and no incomplete file; its output."""
    code, said = process.wait(HANG_SECONDS), (folder / "log").read_text()
    assert code == 0, said
    assert "Traceback" not in said
    assert "error" not in said
    assert "stopping" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    FolderStore(folder / "root").close()  # removes incomplete files of dead processes
    assert not list((folder / "root").glob(".tmp/*"))
    assert not list((folder / "root").glob("jobs/*"))
    return said


@pytest.mark.parametrize(
    ("part", "event", "name", "how"),
    [
        ("dispatcher", "import", "tokenmill.cli", RAISED),
        pytest.param("intake", "import", "typer", RAISED, marks=pytest.mark.exhaustive),
        pytest.param("gateway", "import", "tokenmill.commands.serve", RAISED, marks=pytest.mark.exhaustive),
        pytest.param("worker", "import", "torch", RAISED, marks=pytest.mark.exhaustive),
        pytest.param("worker", "import", "safetensors", RAISED, marks=pytest.mark.exhaustive),
        pytest.param("dispatcher", "import", "redis", RAISED, marks=pytest.mark.exhaustive),
        ("dispatcher", "fcntl.flock", None, RAISED),
        pytest.param("gateway", "socket.bind", None, RAISED, marks=pytest.mark.exhaustive),
        pytest.param("serve", "socket.bind", None, RAISED, marks=pytest.mark.exhaustive),
        ("dispatcher", "import", "schemas.jobs.job", WRAPPED),
        pytest.param("dispatcher", "import", "tokenmill.cli", FINALIZED, marks=pytest.mark.exhaustive),
        pytest.param("dispatcher", "fcntl.flock", None, FINALIZED, marks=pytest.mark.exhaustive),
    ],
)
def test_given_a_stop_signal_during_the_start_then_no_part_starts(
    folder: Path, arguments: Any, start: Any, part: str, event: str, name: str | None, how: str
) -> None:
    (folder / "stop_at_event.py").write_text(STOP_AT_EVENT.format(event=event, name=name, how=how))
    said = check_end(start("-m", "stop_at_event", *arguments(part)), folder)
    assert "serving" not in said
    assert "working for" not in said


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc shows when a process listens for SIGTERM")
@pytest.mark.parametrize(
    "part",
    [pytest.param(each, marks=() if each == "serve" else pytest.mark.exhaustive) for each in PARTS],
)
def test_given_a_stop_signal_at_any_time_since_the_handler_is_installed_then_it_ends_with_0(
    folder: Path, arguments: Any, start: Any, part: str
) -> None:
    for delay in (0.0, random.Random().uniform(0.0, LONGEST)):
        process = start("-m", "tokenmill", *arguments(part))
        wait_for(lambda process=process: listens(process), "it doesn't listen")
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        print(f"stopped after {delay:.3f} s")
        check_end(process, folder)


def listens(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has a handler for SIGTERM."""
    assert process.poll() is None, "it has ended"
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
