"""The items of the example evaluation are what their script makes, and each has one right choice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
EVALUATION = ROOT / "examples/evaluation"


def items(task: str) -> list[dict[str, Any]]:
    """The items of a task, which names their file from the repository's root."""
    settings = yaml.safe_load((EVALUATION / f"{task}.yaml").read_text(encoding="utf-8"))
    assert settings["task"] == task
    lines = (ROOT / settings["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_given_the_script_when_it_runs_then_it_makes_the_committed_files(tmp_path: Path) -> None:
    script = shutil.copy(EVALUATION / "make_items.py", tmp_path)

    subprocess.run([sys.executable, script], check=True)

    for name in ("choices.jsonl", "opposites.jsonl"):
        assert (tmp_path / name).read_bytes() == (EVALUATION / name).read_bytes()


def test_given_the_items_when_they_are_counted_then_each_is_there_once_and_has_different_choices() -> None:
    choices = items("tokenmill_choices")

    assert len({(one["text"], *one["choices"]) for one in choices}) == len(choices) == 200
    assert all(len(set(one["choices"])) == len(one["choices"]) > one["answer"] for one in choices)
    assert {one["kind"]: one["answer"] for one in choices}.keys() == {
        "counting", "order", "sums", "opposites", "sentences",
    }  # fmt: skip
    assert len({one["word"] for one in items("tokenmill_opposites")}) == 40
