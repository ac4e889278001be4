"""Callers of a model whose workers have all ended: they wait, the autoscaler starts a worker, and they are answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from engine.config import ScheduleConfig
from pipeline.models.registry import ModelRegistry
from schemas.settings.settings import Settings
from tests.cluster.lane_cluster import LaneCluster, lane_cluster
from tests.cluster.null_worker import ExpectedAnswers, load_null
from tests.pipeline.observability.scrapes import scrape
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.root import open_root
from tokenmill.services.worker_process import entry_of
from workers.policies.policy import NO_POLICIES

pytestmark = pytest.mark.slow

CALLERS = 3


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisServer, model_folder: Path) -> Iterator[LaneCluster]:
    engine = ("--model", f"null={model_folder}", "--max-num-seqs", 8)
    settings = {
        "TOKENMILL_LANE__MAX_GATEWAY_REQUESTS": str(CALLERS), "TOKENMILL_LANE__SLO__TTFT_SECONDS": "0.001",
    }  # fmt: skip
    with lane_cluster(tmp_path / "cluster", engine, redis_server, **settings) as cluster:
        yield cluster


def _publish(cluster: LaneCluster, model: Path) -> None:
    """Publish the workers' model, as one does that has ended since."""
    settings = Settings()
    with open_root(cluster.variables["TOKENMILL_ROOT"], settings) as root:
        loaded = load_null(f"null={model}", settings, ScheduleConfig())
        ModelRegistry(root.world.store).publish(entry_of(loaded, NO_POLICIES, root))


def _body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"caller {number}"}]
    return {"model": "null", "messages": messages, "max_tokens": 8, "temperature": 0}


@pytest.mark.exhaustive
def test_given_an_empty_pool_when_callers_wait_then_they_start_a_worker_and_are_answered(
    cluster: LaneCluster, model_folder: Path, tokenmill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROOT", "REDIS_URL"):
        monkeypatch.setenv(f"TOKENMILL_{name}", cluster.variables[f"TOKENMILL_{name}"])

    def pool() -> dict[str, Any]:
        done = tokenmill("autoscale", "--once", "--dry-run", "--json")
        assert done.code == 0, done.err
        (found,) = json.loads(done.out)["pools"]
        return dict(found)

    # Given a model of the catalog without a worker
    _publish(cluster, model_folder)
    cluster.start("gateway-1")
    assert (pool()["live"], pool()["desired"]) == (0, 0), "nothing is left to do"
    client = OpenAI(base_url=f"{cluster.url('gateway-1')}/v1", api_key="none", timeout=HANG_SECONDS, max_retries=0)

    def answer(number: int) -> str | None:
        extra = {"ignore_eos": True}
        return client.chat.completions.create(**_body(number), extra_body=extra).choices[0].message.content

    # When a caller waits no longer than its time limit, then that ends its request, and nothing before
    with pytest.raises(APIStatusError) as ended:
        client.chat.completions.create(**_body(0), extra_body={"tokenmill": {"timeout": 1}})
    assert (ended.value.status_code, ended.value.code) == (408, "request_timeout")

    # When others wait, as many as the gateway holds, then a worker is desired
    with ThreadPoolExecutor(CALLERS) as callers:
        waiting = [callers.submit(answer, number) for number in range(CALLERS)]
        metrics = f"{cluster.url('gateway-1')}/metrics"
        wait_for(
            lambda: scrape(metrics).sum("tokenmill_inference_requests", state="waiting") == CALLERS, "they don't wait"
        )
        with pytest.raises(APIStatusError, match=f"{CALLERS} requests wait here already") as refused:
            answer(CALLERS)
        assert refused.value.status_code == 429
        found = wait_for(lambda: (seen := pool())["desired"] and seen, "no worker is desired")
        assert found is not None
        assert (found["desired"], found["live"], found["callers"], found["reason"]) == (1, 0, CALLERS, "callers wait")
        assert not any(one.done() for one in waiting)

        # Then they are answered once it is there
        cluster.start("worker-1")
        texts = [one.result(HANG_SECONDS) for one in waiting]
    assert texts == ExpectedAnswers(model_folder).texts([_body(number) for number in range(CALLERS)])
    counted = scrape(metrics).all("tokenmill_answer_latency_total", tier="interactive", tenant="default")
    assert {latency: count for (latency,), count in counted.items() if count} == {
        "late_first_token": CALLERS + 1, "refused": 1,
    }, "the promise is a millisecond"  # fmt: skip
