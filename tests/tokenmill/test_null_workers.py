"""Null workers as real processes: what they answer can be worked out, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.catalog import Catalog
from pipeline.inputs import pin_uri
from pipeline.intake import Intake, IntakeSettings, JobDraft
from pipeline.ports import World
from schemas.limits import PlanSettings
from schemas.options import JobOptions
from tests.cluster.cluster import NULL_WORKER, wait_for
from tests.cluster.null_worker import Answers
from tests.servers.redis import RedisServer

SECONDS = 60
ROWS = 120
ROOT = Path(__file__).parents[2]


@contextmanager
def running(place: Path, name: str, *program: object, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block; what it said is shown."""
    log = place / f"{name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *map(str, program)],
            stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(f"-- {name}\n{log.read_text()}")


def test_given_two_null_workers_when_one_is_killed_then_all_texts_are_those_worked_out_from_the_requests(
    place: Path,
    model_folder: Path,
    chat: Any,
    write_lines: Callable[..., Path],
    results: Any,
    redis_server: RedisServer,
) -> None:
    lines = [chat(f"r{n}", f"number {n}", max_tokens=8 + n % 30, ignore_eos=True) for n in range(ROWS)]
    source = write_lines(*lines)
    variables = {
        "TOKENMILL_REDIS_URL": redis_server.url,
        "TOKENMILL_ROOT": str(place / "root"),
        "TOKENMILL_CHECKPOINT_SECONDS": "0.1",
    }
    worker = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", 8, "--step-ms", 20)
    with ExitStack() as stack:
        killed = stack.enter_context(running(place, "killed", *worker, **variables))
        living = stack.enter_context(running(place, "living", *worker, **variables))
        stack.enter_context(running(place, "dispatcher", "-m", "tokenmill", "dispatcher", **variables))
        store = stack.enter_context(FolderStore(place / "root"))
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        wait_for(Catalog(store).entries, SECONDS, "no worker is up")
        intake = Intake(world, IntakeSettings(plan=PlanSettings(max_shard_rows=20)))
        intake.accept(JobDraft(pin_uri(str(source)), JobOptions(), "default", "job-1"))
        job = place / "root/jobs/job-1"
        wait_for(lambda: list(job.glob("work/*/*-0*")), SECONDS, "nothing is checkpointed")
        killed.kill()
        wait_for((job / "manifest.json").exists, SECONDS, "the job did not end")
        living.send_signal(signal.SIGTERM)
        assert living.wait(SECONDS) == 0
    manifest = json.loads((job / "manifest.json").read_text())
    assert (manifest["status"], manifest["counts"]["succeeded"]) == ("completed", ROWS)
    answers = Answers(model_folder)
    assert [row["text"] for row in results(job)] == answers.texts([line["body"] for line in lines])
    # Another prompt of the same length has another answer.
    two = answers.texts([chat("", f"number {n}", max_tokens=8)["body"] for n in (34, 35)])
    assert two[0] != two[1]
