"""A call says at once that the engine is being imported, in a terminal and in a log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill as tm
from tests.tokenmill.command_processes import ROOT

IMPORTED = "torch is imported here"
CUT = f"""
import importlib.abc, os, sys

class CutTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.write(2, b"{IMPORTED}\\n")
            os._exit(0)

sys.meta_path.insert(0, CutTorch())
"""
MAP = "import tokenmill as tm\ntm.map([{'item': 'a'}], prompt='{{ item }}', model='demo')"
DRY_RUN = "import tokenmill as tm\ntm.map([{'item': 'a'}], prompt='{{ item }}', model='demo', dry_run=True)"
RUN = (
    "sys.argv = 'tokenmill run in.jsonl --prompt prompt.txt --model demo --output out'.split()\n"
    "import tokenmill.__main__\ntokenmill.__main__.main()"
)
ESTIMATE = (
    "sys.argv = 'tokenmill estimate in.jsonl --model demo'.split()\n"
    "import tokenmill.__main__\ntokenmill.__main__.main()"
)


def lines_before_torch(program: str, folder: Path, stderr: int) -> None:
    """Run the program until it imports torch."""
    (folder / "in.jsonl").write_text('{"item": "a"}\n')
    (folder / "prompt.txt").write_text("{{ item }}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    subprocess.run([sys.executable, "-c", CUT + program], cwd=folder, stderr=stderr, env=environment, check=True)


BENCH = "sys.argv = 'tokenmill bench'.split()\nimport tokenmill.__main__\ntokenmill.__main__.main()"


@pytest.mark.slow
@pytest.mark.parametrize("program", [MAP, DRY_RUN, RUN, ESTIMATE, BENCH])
def test_given_a_terminal_when_called_then_the_import_is_announced_before_it_begins(
    program: str, tmp_path: Path
) -> None:
    master, slave = pty.openpty()
    try:
        lines_before_torch(program, tmp_path, slave)
        shown = os.read(master, 10_000).decode()
    finally:
        os.close(slave)
        os.close(master)

    assert shown.split("\r\n") == ["importing the engine", IMPORTED, ""]


def test_given_the_package_when_looked_at_then_its_functions_are_listed() -> None:
    assert dir(tm) == sorted(tm.__all__)
    listed = {word.strip(",") for line in (tm.__doc__ or "").splitlines() for word in line.split()[:2]}
    assert set(tm.__all__) <= listed


@pytest.mark.slow
def test_given_all_functions_when_they_are_looked_up_then_the_engine_is_not_imported() -> None:
    program = "import sys, tokenmill as tm; [getattr(tm, name) for name in dir(tm)]; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


@pytest.mark.slow
def test_given_no_terminal_when_called_then_the_import_is_announced_once(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("wb") as file:
        lines_before_torch(MAP, tmp_path, file.fileno())

    assert log.read_text() == f"importing the engine\n{IMPORTED}\n"
