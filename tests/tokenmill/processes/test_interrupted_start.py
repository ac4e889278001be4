"""Ctrl-C while the program is still being loaded: one line and 130, as at any later moment."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenmill.errors import interrupted

REPOSITORY = Path(__file__).parents[3]
AS_MODULE = "import runpy; runpy.run_module('tokenmill', run_name='__main__', alter_sys=True)"

WRAPPED = """exec('''
class SignalOnSetName:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)
class Owner:
    attribute = SignalOnSetName()
''', globals())"""
"""Python 3.11 replaces an exception of `__set_name__` by a RuntimeError."""

FINALIZED = """exec('''
class SignalOnDelete:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
SignalOnDelete()
''', globals())"""
"""Python swallows an exception of a finalizer, and prints a traceback."""

INTERRUPTED = """
import signal, sys
def interrupt(event, details):
    if event == "import" and details[0] == {moment!r}:
        {how}
sys.addaudithook(interrupt)
sys.argv = ["tokenmill", "run", "requests.jsonl", "--model", "none", "-o", "out"]
{start}
"""


def as_console_script() -> str:
    """The script that an installer writes for the command `tokenmill`."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["tokenmill"].split(":")
    return f"from {module} import {function}; sys.exit({function}())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "moment", "how"),
    [
        ("script", "tokenmill.errors", "signal.raise_signal(signal.SIGINT)"),
        pytest.param("module", "tokenmill.cli", "signal.raise_signal(signal.SIGINT)", marks=pytest.mark.exhaustive),
        pytest.param("script", "typer", "exec('signal.raise_signal(signal.SIGINT)')", marks=pytest.mark.exhaustive),
        ("module", "tokenmill.commands.run", "exec('signal.raise_signal(signal.SIGINT)')"),
        pytest.param("script", "tokenmill.cli", WRAPPED, marks=pytest.mark.exhaustive),
        ("module", "schemas.jobs.job", WRAPPED),
        pytest.param("module", "tokenmill.cli", FINALIZED, marks=pytest.mark.exhaustive),
        ("module", "tokenmill.commands.run", FINALIZED),
        ("script", "torch", "exec('signal.raise_signal(signal.SIGINT)')"),
    ],
)
def test_given_ctrl_c_while_modules_are_imported_then_it_exits_as_at_any_other_time(
    tmp_path: Path, form: str, moment: str, how: str
) -> None:
    """Whatever is about to be imported: from the first module to those that only `run` needs."""
    start = AS_MODULE if form == "module" else as_console_script()
    (tmp_path / "requests.jsonl").write_text("{}\n")
    (tmp_path / "interrupted.py").write_text(INTERRUPTED.format(moment=moment, how=how, start=start))

    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],  # as a module, for only so Python ends by the signal after all
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    assert not (tmp_path / "out").exists()


def test_given_an_error_that_is_its_own_cause_then_it_is_no_interruption() -> None:
    error, other = RuntimeError("round"), ValueError("and round")
    error.__cause__, other.__cause__ = other, error
    assert not interrupted(error)
    other.__cause__ = KeyboardInterrupt()
    assert interrupted(error)
