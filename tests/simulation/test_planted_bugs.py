"""Planted bugs: the simulator must find each of them within a bounded number of seeds.

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
    "announcer-that-marks-before-it-sends": r"I2: .* is marked as published, but was not",
    "collector-that-takes-logs-of-open-jobs": r"I2: jobs/.*/(work|plans)/.* is removed, but is still needed",
    "commit-before-the-bytes-are-durable": r"I[24]: results/",
    "consumer-that-leaves-jobs-to-the-next": r"I1: a record that was sent \d times is 0 rows",
    "dispatcher-that-trusts-an-emptied-server": r"I5: \d+ tokens were sampled twice, though no process died",
    "floor-that-never-comes": r"I7: zoe's bulk work was kept waiting",
    "controller-that-takes-an-unfinished-plan": r"I7: ",
    "intake-that-names-a-job-anew": r"I1: drop-\d.jsonl became another job",
    "manifest-before-the-last-part": r"I1: manifest.json stands|I3: the manifest lists",
    "o-excl-commits": r"I4: |is not JSON|is not a whole Parquet file",
    "plan-without-segment": r"no such part is planned|holds \d+ results for \d+ rows|I1: ",
    "planner-that-trusts-the-lease": r"I2: plan/\d+.json of \S+ has changed",
    "resume-from-nothing": r"I5: row \d+ goes on from \d+ tokens",
    "retry-that-rewrites-a-part": r"I2: results/part-\d+.parquet has changed",
    "shares-that-are-never-charged": r"I7: zoe's standard work was kept waiting",
}
"""Patch -> what the message of the broken history says."""

OF_ROOTS = {
    "announcer-that-marks-before-it-sends",
    "collector-that-takes-logs-of-open-jobs",
    "consumer-that-leaves-jobs-to-the-next",
    "dispatcher-that-trusts-an-emptied-server",
    "floor-that-never-comes",
    "controller-that-takes-an-unfinished-plan",
    "intake-that-names-a-job-anew",
    "planner-that-trusts-the-lease",
    "shares-that-are-never-charged",
}
"""Patches that only a whole root shows; the others are found in histories of one job."""


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOUND_AS)
def test_each_planted_bug_is_found_within_1000_seeds(name: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    plant(name, folder)
    kind = "root" if name in OF_ROOTS else "job"
    command = [sys.executable, "-m", "tests.simulation", "--kind", kind, "--seeds", str(SEEDS), "--first"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, f"nothing was found: {done.stdout}{done.stderr}"
    seed, _, what = done.stdout.partition(": ")
    assert seed.startswith("seed "), done.stdout + done.stderr
    assert re.search(FOUND_AS[name], what.splitlines()[0]), what
