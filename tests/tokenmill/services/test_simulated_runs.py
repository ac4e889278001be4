"""The simulator against the real thing: the same trace through a dispatcher and two null workers, whose steps take a
known time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.heartbeats import RedisHeartbeats
from pipeline.models.catalog import Catalog
from pipeline.simulator.settings import SimulationSettings
from pipeline.simulator.simulation import simulate
from pipeline.simulator.trace import Trace, TracedJob
from pipeline.simulator.worker_model import Decoding, WorkerModel
from schemas.jobs.job import Tier
from schemas.requests.limits import PlanSettings
from schemas.settings.autoscaling import ScalingLimits
from tests.cluster.cluster import NULL_WORKER
from tests.servers.redis import RedisServer
from tests.tokenmill.services.test_null_workers import Cluster, finished_at
from tests.waiting import wait_for

STEP_MS = 50
BATCH = 16
ROWS_IN_SHARD = 24
WORKER = WorkerModel(
    name="steps of 50 ms",
    prefill=2_048 / (STEP_MS / 1_000),
    decode=(
        Decoding(batch=1, tokens_per_second=1_000 / STEP_MS),
        Decoding(batch=BATCH, tokens_per_second=BATCH * 1_000 / STEP_MS),
    ),
)
PROMPT = 25.0
JOBS = (
    TracedJob(at=0, rows=150, prompt_tokens=PROMPT, output_tokens=40, tier=Tier.BULK),
    TracedJob(at=4, rows=100, prompt_tokens=PROMPT, output_tokens=60),
    TracedJob(at=14, rows=170, prompt_tokens=PROMPT, output_tokens=30),
    TracedJob(at=14, rows=40, prompt_tokens=PROMPT, output_tokens=100, tier=Tier.BULK),
)


@pytest.fixture
def cluster(folder: Path, redis_server: RedisServer) -> Iterator[Cluster]:
    with ExitStack() as stack:
        store = stack.enter_context(FolderStore(folder / "root"))
        yield Cluster(folder, store, redis_server, stack)


def simulated() -> list[float]:
    """When each job ends, seconds after the first came."""
    outcome = simulate(
        Trace("the same", JOBS),
        SimulationSettings(
            WORKER,
            ScalingLimits(max_workers=2),
            fixed_workers=2,
            plan=PlanSettings(max_shard_rows=ROWS_IN_SHARD),
            answer_error=0.0,
        ),
    )
    return [job.ended or 0.0 for job in outcome.jobs]


@pytest.mark.exhaustive
def test_given_a_trace_when_two_real_workers_do_it_then_their_throughput_is_the_simulated_one(
    cluster: Cluster, redis_server: RedisServer, model_folder: Path, chat: Any, tmp_path: Path
) -> None:
    worker = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", BATCH, "--step-ms", STEP_MS)
    for name in ("one", "two"):
        cluster.start(name, *worker)
    wait_for(lambda: Catalog(cluster.world.store).entries(), "no model is served")
    heartbeats = RedisHeartbeats(RedisSettings(redis_server.url), lifetime=12.0)
    wait_for(lambda: len(heartbeats.workers()) == 2, "the workers aren't up")
    heartbeats.close()
    begun, folders = time.time(), []
    for number, job in enumerate(JOBS):
        lines = [
            chat(f"r{row}", f"job {number} row {row}", max_tokens=round(job.output_tokens), ignore_eos=True)
            for row in range(job.rows)
        ]
        source = tmp_path / f"{number}.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        time.sleep(max(0.0, begun + job.at - time.time()))
        folders.append(cluster.submit(source, f"job-{number}", ROWS_IN_SHARD, tier=job.tier))
    for folder in folders:
        wait_for((folder / "manifest.json").exists, "a job did not end")
    real = [finished_at(folder).timestamp() - begun for folder in folders]
    expected = simulated()
    tokens = sum(job.rows * job.output_tokens for job in JOBS)
    print(f"real {[round(end, 1) for end in real]}, simulated {[round(end, 1) for end in expected]}")
    print(f"tokens/s: real {tokens / max(real):.0f}, simulated {tokens / max(expected):.0f}")
    assert max(expected) == pytest.approx(max(real), rel=0.1)
    for ends, should in zip(real, expected, strict=True):
        assert should == pytest.approx(ends, rel=0.25), "each of the jobs"
