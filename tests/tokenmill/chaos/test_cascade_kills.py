"""A cascade that is killed in each of its steps ends with the answers of an undisturbed one."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROWS = 240
MOMENTS = (
    "job.json", "work/*/*", "results/part-00003.parquet", "cascade/1/job.json", "cascade/1/results/part-00001.parquet",
    "cascade/2/job.json", "cascade/2/work/*/*",
)  # fmt: skip
"""Each kill comes when there is a file of this pattern."""

COMPARED = ("row", "custom_id", "status", "text", "model", "served_by")


@pytest.fixture
def processes(folder: Path) -> Iterator[Processes]:
    made = Processes(folder, TOKENMILL_PLAN__MAX_SHARD_ROWS="16", TOKENMILL_CHECKPOINT_SECONDS="0.1")
    yield made
    made.close()


def test_a_killed_cascade_goes_on_where_it_stood(
    processes: Processes, model_folder: Path, folder: Path, chat: Any, tiny_models: Any
) -> None:
    large = folder / "large"
    tiny_models.make_tiny_model("llama", large, vocab_size=300, num_hidden_layers=2, seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, large / name)
    lines = (chat(f"r{n}", f"number {n}", max_tokens=20 + n % 30) for n in range(ROWS))
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(out: str) -> int:
        return processes.start(
            "-m", "tokenmill", "run", "in.jsonl", "--model", f"tiny={model_folder}", "--then", f"large={large}",
            "--agreement", "0.5", "--sample", "60", "--output", out, "--dtype", "float32", "--threads", 1,
        )  # fmt: skip

    assert processes.running[start("calm")].wait(HANG_SECONDS) == 0, processes.log(0).read_text()
    killed = []
    for moment in MOMENTS:
        process = processes.running[start("out")]
        wait_for(lambda: process.poll() is not None or any((folder / "out").glob(moment)))  # noqa: B023
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed.append(moment)
        process.wait(HANG_SECONDS)
        assert not (folder / "out" / "cascade" / "cascade.json").exists()
    last = start("out")
    assert processes.running[last].wait(HANG_SECONDS) == 0, processes.log(last).read_text()
    assert killed == [*MOMENTS], "a step ended before its kill"

    calm, out = (pq.read_table(folder / name / "cascade" / "merged.parquet") for name in ("calm", "out"))
    assert out.select(COMPARED).equals(calm.select(COMPARED))
    outcomes = [json.loads((folder / name / "cascade" / "cascade.json").read_text()) for name in ("calm", "out")]
    for one in outcomes:
        assert sum(step["accepted"] for step in one["steps"]) == ROWS
    known = ("model", "rows", "accepted", "rejected")
    assert [[step[name] for name in known] for step in outcomes[0]["steps"]] == [
        [step[name] for name in known] for step in outcomes[1]["steps"]
    ]
    assert outcomes[0]["min_mean_logprob"] == pytest.approx(outcomes[1]["min_mean_logprob"], abs=1e-5)
