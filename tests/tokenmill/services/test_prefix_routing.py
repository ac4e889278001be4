"""Requests go to the worker of their prefix over real processes, and wait for no worker that is dead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.lane_cluster import LaneCluster, lane_cluster
from tests.cluster.null_worker import ExpectedAnswers
from tests.cluster.stream_clients import Plan, Reader, report_of, run_clients
from tests.pipeline.observability.scrapes import Scrape, scrape
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

WORKERS = ("worker-1", "worker-2", "worker-3")
PROMPTS = 9
ROUTED, STOLEN = "tokenmill_lane_routed_requests_total", "tokenmill_lane_stolen_requests_total"


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisServer, model_folder: Path) -> Iterator[LaneCluster]:
    engine = ("--model", f"null={model_folder}", "--max-num-seqs", 8)
    with lane_cluster(tmp_path / "cluster", engine, redis_server) as cluster:
        cluster.start("gateway-1", *WORKERS)
        yield cluster


def body(prompt: int, number: int) -> dict[str, Any]:
    """A chat with one of the long system prompts, of 12 tokens."""
    system = f"You are the clerk of shop number {prompt}. " + "Be polite and short. " * 11
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"customer {number}"}]
    return {"model": "null", "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def readers(model: Path, count: int, seconds: float) -> tuple[Reader, ...]:
    """Clients that come over so many seconds, each with its expected answer."""
    bodies = [body(number % PROMPTS, number) for number in range(count)]
    texts = ExpectedAnswers(model).texts(bodies)
    return tuple(
        Reader(body | {"stream": True}, text, delay=seconds * number / count)
        for number, (body, text) in enumerate(zip(bodies, texts, strict=True))
    )


def metrics(cluster: LaneCluster) -> Scrape:
    """The gateway's, with those of its workers."""
    return scrape(f"{cluster.url('gateway-1')}/metrics")


def wait_until_routed(cluster: LaneCluster, model: Path) -> None:
    """Send requests until one is addressed to a worker: the gateway knows two then."""

    def is_routed() -> bool:
        (seen,) = report_of(run_clients(Plan(cluster.url("gateway-1"), readers(model, 1, 0.0))))
        assert not seen.wrong
        return metrics(cluster).sum(ROUTED, route="prefix") > 0

    wait_for(is_routed, "no request is addressed to a worker")


@pytest.mark.exhaustive
def test_given_a_worker_that_is_killed_while_requests_wait_for_it_then_all_are_answered(
    cluster: LaneCluster, model_folder: Path
) -> None:
    wait_until_routed(cluster, model_folder)
    wait_for(lambda: metrics(cluster).sum("tokenmill_workers") == len(WORKERS), "not all workers report")
    before = metrics(cluster)
    process = cluster.processes["worker-2"]
    process.send_signal(signal.SIGSTOP)  # it lives by its heartbeats, and takes nothing
    asked = readers(model_folder, 90, 3.0)
    clients = run_clients(Plan(cluster.url("gateway-1"), asked))
    wait_for(lambda: metrics(cluster).sum(STOLEN) > 0, "no other worker takes its requests")
    cluster.kill("worker-2")
    assert [one.wrong for one in report_of(clients) if one.wrong] == []
    after = metrics(cluster)
    routed = {
        route: after.sum(ROUTED, route=route) - before.sum(ROUTED, route=route) for route in ("prefix", "general")
    }
    assert routed["general"] == 0, "each has a long system prompt"
    assert routed["prefix"] > 0


@pytest.mark.exhaustive
def test_routing_can_be_turned_off(cluster: LaneCluster, model_folder: Path) -> None:
    wait_until_routed(cluster, model_folder)
    cluster.end("gateway-1")
    cluster.variables["TOKENMILL_LANE__ROUTING__BY_PREFIX"] = "false"
    cluster.start("gateway-1")
    seen = report_of(run_clients(Plan(cluster.url("gateway-1"), readers(model_folder, 9, 1.5))))
    assert [one.wrong for one in seen if one.wrong] == []
    assert metrics(cluster).all(ROUTED) == {}
