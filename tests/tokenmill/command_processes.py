"""Commands as processes, with helpers for those that serve HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.waiting import HANG_SECONDS, wait_for

ROOT = Path(__file__).parents[2]


class Processes:
    """Commands as processes; each is killed at the end, and its log shown."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *program: object, **variables: str) -> int:
        """Start one; its number."""
        number = len(self.running)
        with self.log(number).open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, *map(str, program)],
                    stdout=log, stderr=log, env={**os.environ, **self.variables, **variables},
                )
            )  # fmt: skip
        return number

    def log(self, number: int) -> Path:
        return self.folder / f"process-{number}.log"

    def url(self, number: int) -> str:
        """The URL of a gateway process, from its output."""

        def logged_url() -> str | None:
            assert self.running[number].poll() is None, self.log(number).read_text()
            found = re.search(r"(http://[0-9.:]+)/v1", self.log(number).read_text())
            return None if found is None else found[1]

        return wait_for(logged_url, "it serves nothing") or ""

    def close(self) -> None:
        for number, process in enumerate(self.running):
            process.kill()
            process.wait()
            print(f"-- {process.args}\n{self.log(number).read_text()[-4000:]}")


def ended(client: OpenAI, batch_id: str) -> Any:
    """The batch, once it has ended."""
    until = time.monotonic() + HANG_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
    return batch


def as_jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
