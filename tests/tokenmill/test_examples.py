"""The programs in examples/ run as they stand: each as a process, against a real installation where it needs one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cluster.cluster import BUCKET, running_cluster
from tests.tokenmill.command_processes import ROOT, Processes
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow


def run_example(folder: Path, name: str, *arguments: object, **variables: str) -> list[str]:
    """The lines that `examples/NAME.py` prints, run in `folder`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_file_is_answered_on_this_machine(folder: Path, model_folder: Path) -> None:
    printed = run_example(folder, "from_a_file", model_folder)

    assert [line.partition(":")[0] for line in printed[-4:]] == ["France", "Japan", "Kenya", "Peru"]
    assert pq.read_table(folder / "out/capitals/job/results").column("status").to_pylist() == ["succeeded"] * 4


@pytest.mark.exhaustive
def test_texts_are_embedded_and_compared(folder: Path, embedding_model: Path) -> None:
    printed = run_example(folder, "embed_texts", embedding_model)

    rows = pq.read_table(folder / "out/texts/job/results").to_pylist()
    assert len(rows) == 4
    assert all(row["embedding"] for row in rows)
    nearest = dict(line.split(" -> ") for line in printed[-4:])
    assert all(text != other for text, other in nearest.items())


@pytest.mark.exhaustive
def test_the_openai_client_streams_a_chat_and_runs_a_batch(folder: Path, model_folder: Path) -> None:
    with closing(Processes(folder)) as processes:
        model = f"tiny={model_folder}"
        number = processes.start(
            "-m", "tokenmill", "serve", "--data", folder / "data", "--model", model, "--port", 0, "--threads", 1
        )
        variables = {"OPENAI_BASE_URL": f"{processes.url(number)}/v1", "OPENAI_API_KEY": "none"}
        printed = run_example(folder, "openai_client", "tiny", **variables)

    assert any(line.endswith(": completed") for line in printed)
    assert [line.partition(":")[0] for line in printed[-3:]] == ["count-to-3", "count-to-4", "count-to-5"]


@pytest.mark.exhaustive
def test_a_bucket_kafka_and_celery_are_answered_by_an_installation(folder: Path, model_folder: Path) -> None:
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1")
    with running_cluster(folder / "cluster", engine, ("dispatcher-1", "intake-1", "worker-1")) as cluster:
        wait_for(lambda: list(cluster.store().list("catalog/")), "no worker is up")

        s3: dict[str, Any] = {
            name: cluster.variables[name]
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
        }
        bucket = run_example(folder, "from_a_bucket", BUCKET, "tiny", AWS_ENDPOINT_URL=cluster.s3.endpoint, **s3)
        kafka = run_example(folder, "kafka_producer", cluster.kafka.bootstrap, "tiny")
        celery = run_example(folder, "celery_call", cluster.redis.url, "tiny")

        assert sorted(line.partition(":")[0] for line in bucket[-3:]) == ["question-2", "question-3", "question-5"]
        assert len([line for line in kafka if ": succeeded" in line]) == 5
        job = celery[-1].partition(":")[0]
        assert job in cluster.jobs()
        wait_for(lambda: job in cluster.outcomes(), "the job of the Celery task did not end")
        assert cluster.outcomes()[job].counts.succeeded == 3
        assert set(cluster.stop().values()) == {0}
