"""Bugs planted on purpose: each must break a history soon, or the simulator sees nothing.

A patch that no longer applies fails here: make it again from the same mistake in today's code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGES = ("schemas", "engine", "pipeline", "workers", "tests/simulation")
SEEDS = 1_000

FOUND_AS = {
    "commit-before-the-bytes-are-durable": r"I[24]: results/",
    "manifest-before-the-last-part": r"I1: manifest.json stands|I3: the manifest lists",
    "o-excl-commits": r"I4: |is not JSON|is not a whole Parquet file",
    "plan-without-segment": r"no such part is planned|holds \d+ results for \d+ rows|I1: ",
    "resume-from-nothing": r"I5: row \d+ goes on from \d+ tokens",
    "retry-that-rewrites-a-part": r"I2: results/part-\d+.parquet has changed",
}
"""Patch -> what the message of the broken history says."""


def copied(folder: Path) -> Path:
    """The source, to be broken."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def plant(name: str, folder: Path) -> None:
    """Apply the patch, whole and where it belongs, or fail."""
    patch = HERE / "planted" / f"{name}.patch"
    done = subprocess.run(["git", "apply", "-v", str(patch)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} does not apply to today's code; make it again: {done.stderr}"


def test_all_patches_are_tried() -> None:
    assert {path.stem for path in (HERE / "planted").glob("*.patch")} == FOUND_AS.keys()


@pytest.mark.parametrize("name", FOUND_AS)
def test_each_planted_bug_still_applies(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    plant(name, folder)
    assert any(path.read_bytes() != data for path, data in before.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FOUND_AS)
def test_each_planted_bug_is_found_within_1000_seeds(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    plant(name, folder)
    command = [sys.executable, "-m", "tests.simulation", "--seeds", str(SEEDS), "--first"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, f"nothing was found: {done.stdout}{done.stderr}"
    seed, _, what = done.stdout.partition(": ")
    assert seed.startswith("seed "), done.stdout + done.stderr
    assert re.search(FOUND_AS[name], what.splitlines()[0]), what
