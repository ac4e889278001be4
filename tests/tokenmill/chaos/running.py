"""Real runs of the command line: their start, their input, and their readiness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
GRACE = 900.0
"""A time-out in seconds for steps of one or two seconds, for machines that are ten times slower."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "n": 2, "stop": ["\n\n", " the"]},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
]


@dataclass(frozen=True)
class Setup:
    """How the command is run; `model` as `--model` takes it, `folder` for everything."""

    model: str
    folder: Path
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.model.split("=")[0]

    def start(self, source: Path, out: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
        """Start the run; `more` options and variables come last, and count."""
        command = [sys.executable, "-m", "tokenmill", "run", str(source), "--model", self.model, "--output", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **dict(self.environment), **variables}
        return subprocess.Popen(
            [*command, "--dtype", "float32", *self.options, *more],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip


def write_requests(path: Path, model: str, rows: int, max_tokens: int) -> None:
    """Chat requests of all kinds, one broken line among them, and two with the same request."""
    lines = []
    for row in range(rows):
        topic = f"the number {row if row != rows - 1 else 0} and what it means"
        body = {"model": model, "messages": [{"role": "user", "content": f"Tell me about {topic}."}]}
        body |= {"max_tokens": max_tokens + row % 7, **KINDS[row % len(KINDS) if row != rows - 1 else 0]}
        line = {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append("{broken" if row == 3 else json.dumps(line))
    path.write_text("\n".join(lines) + "\n")


def is_up(process: subprocess.Popen[str]) -> bool:
    """Whether the process has got as far as tokenmill's own code: it has loaded a library that Python doesn't bring."""
    try:
        return "site-packages" in Path(f"/proc/{process.pid}/maps").read_text()
    except FileNotFoundError:
        return True
