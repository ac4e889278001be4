"""What `pip install tokenmill[engine]` alone can do: everything in this process, and submission to others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OF_OTHER_EXTRAS = (
    "boto3", "botocore", "celery", "datasets", "duckdb", "fastapi", "kafka", "kombu", "limits", "opentelemetry",
    "pandas", "polars", "prometheus_client", "pyspark", "python_multipart", "ray", "redis", "starlette", "uvicorn",
    "websockets",
)  # fmt: skip

PROGRAM = f"""
import importlib.machinery, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_OTHER_EXTRAS!r}:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(importlib.machinery.PathFinder, name)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder()
import tokenmill as tm
from tokenmill.cli import main
model, requests, out = sys.argv[1:]
for command in (
    ["run", requests, "--model", f"tiny={{model}}", "--output", out],
    ["jobs", "show", out],
    ["estimate", requests, "--model", f"tiny={{model}}"],
    ["gc", "--root", out],
):
    code = main(command)
    assert code == 0, (command, code)
(row,) = tm.map([{{"item": "a"}}], prompt="{{{{ item }}}}?", model=f"tiny={{model}}", max_tokens=2)
assert row["answer_error"] is None, row
"""


@pytest.mark.slow
def test_given_no_other_extra_when_jobs_run_in_this_process_then_nothing_is_missing(
    folder: Path, model_folder: Path, chat: Any, write_lines: Any, results: Any
) -> None:
    requests = write_lines(chat("a"))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model_folder, requests, folder / "out"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in results(folder / "out")] == ["succeeded"]
