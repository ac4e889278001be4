"""Metrics of real processes at /metrics, compared with the requests that they served."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from pipeline.observability.metric_definitions import METRICS
from schemas.jobs.outcome import Usage
from tests.cluster.cluster import NULL_WORKER
from tests.pipeline.observability.scrapes import Scrape, scrape
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.tokenmill.services.test_gateway import CHAT
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

NAMES = {metric.name for metric in METRICS if metric.by != ("autoscale",)}
SELDOM = {
    "tokenmill_oldest_waiting_seconds", "tokenmill_shards", "tokenmill_backlog_tokens", "tokenmill_jobs",
    "tokenmill_virtual_model_requests_total", "tokenmill_routing_label_failures_total",
    "tokenmill_expert_load", "tokenmill_speculation_gained_tokens", "tokenmill_speculation_compared_seconds_total",
    *(
        name
        for name in NAMES
        if name.startswith(
            ("tokenmill_release", "tokenmill_canary", "tokenmill_warmup", "tokenmill_kv_tier", "tokenmill_gpu")
        )
    ),
    *(name for name in NAMES if name.startswith("tokenmill_experiment")),
    # Without TOKENMILL_OVERLOAD:
    "tokenmill_shed_requests_total",
    "tokenmill_forecast_wait_seconds",
    "tokenmill_degradation_step_active",
    # Without --role:
    "tokenmill_handovers_total",
    "tokenmill_kv_fetch_seconds_total",
    "tokenmill_kv_transfer_bytes_total",
    "tokenmill_kv_transfers_failed_total",
    # Without --adapter:
    "tokenmill_adapter_requests_total", "tokenmill_adapter_tokens_total", "tokenmill_adapter_weights_bytes",
    # Without --content-policy:
    "tokenmill_judged_texts_total",
    "tokenmill_content_policy_failures_total",
    "tokenmill_guard_tokens_total",
}  # fmt: skip
"""Reported only while there are samples (open jobs, drafts that could be compared, mixtures, a folder of blocks,
GPUs), or never by a process that can't have candidates alongside it."""


def metrics_url(processes: Processes, number: int) -> str:
    """The URL of a process's metrics, from its log."""

    def logged_url() -> str | None:
        assert processes.running[number].poll() is None, processes.log(number).read_text()
        plain = re.sub(r"\x1b\[[0-9;]*m", "", processes.log(number).read_text())
        found = re.search(r"url='?(http://[^\s']+/metrics)", plain)
        return None if found is None else found[1]

    return wait_for(logged_url, "no metrics URL is logged") or ""


def scrape_until(url: str, so: Callable[[Scrape], bool], **how: Any) -> Scrape:
    until = time.monotonic() + HANG_SECONDS
    while not so(found := scrape(url, **how)):
        assert time.monotonic() < until, [family.samples for family in found.families]
        time.sleep(0.1)
    return found


def manifests(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(root.glob("jobs/*/manifest.json"))]


def test_serve_counts_rows_and_tokens_exactly(
    processes: Processes, model_folder: Path, chat: Any, folder: Path
) -> None:
    # Given `serve` with a price, and a file with copies, an invalid line and a row that is too long,
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    served = processes.start(
        "-m", "tokenmill", "serve", "--data", "data", "--port", 0, "--price-per-hour", 3.6, "--metrics-port", 0, *engine
    )
    url = processes.url(served)
    client = OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key="none")
    rows = [chat(f"r{n}", f"number {n % 20}", max_tokens=6, temperature=0) for n in range(25)]
    data = as_jsonl([*rows, chat("long", "x" * 3_000)]) + b"not json\n"
    # when it is answered, and two chats are,
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    on_invalid: dict[str, Any] = {"extra_body": {"tokenmill": {"on_invalid": "row"}}}
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **on_invalid)
    assert ended(client, batch.id).status == "completed"
    usages = [client.chat.completions.create(**rows[0]["body"]).usage]
    *_, last = client.chat.completions.create(**rows[1]["body"], stream=True, stream_options={"include_usage": True})
    usages.append(last.usage)
    # then the metrics are the manifest's, and the chats'.
    (manifest,) = manifests(folder / "data")
    chats = sum(usage.completion_tokens for usage in usages if usage is not None)
    wanted = {"model": "tiny", "kind": "completion"}

    def is_all(found: Scrape) -> bool:
        tokens = sum(found.all("tokenmill_tokens_total", **wanted).values())
        return tokens == manifest["usage"]["completion"] + chats and bool(found.all("tokenmill_cost_total"))

    found = scrape_until(f"{url}/metrics", is_all)
    counts, usage = manifest["counts"], manifest["usage"]
    assert (counts["total"], counts["failed"]) == (27, 2)
    committed = {key: int(value) for key, value in found.all("tokenmill_committed_rows_total", tier="standard").items()}
    assert committed == {(name,): counts[name] for name in ("succeeded", "failed", "expired", "cancelled")}
    for kind in Usage.model_fields:
        assert found.sum("tokenmill_committed_tokens_total", tier="standard", kind=kind) == usage[kind]
    for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
        assert found.sum("tokenmill_tokens_total", tier="standard", kind=kind) == usage[kind]
    interactive = {"tier": "interactive"}
    assert found.sum("tokenmill_tokens_total", kind="completion", **interactive) == chats
    assert found.sum("tokenmill_requests_total", status="succeeded", **interactive) == 2
    assert found.sum("tokenmill_requests_total", status="succeeded", tier="standard") == 20, "copies are computed once"
    assert found.sum("tokenmill_time_to_first_token_seconds_count", **interactive) == 2
    assert found.sum("tokenmill_inter_token_seconds_count", **interactive) <= chats - 2
    assert found.sum("tokenmill_request_seconds_count", tier="standard") == 20
    assert found.sum("tokenmill_answers_total", result="answered", **interactive) == 2
    assert found.sum("tokenmill_answer_seconds_sum", **interactive) >= found.sum(
        "tokenmill_request_seconds_sum", **interactive
    )
    assert found.sum("tokenmill_engine_tokens_total", kind="generated") == usage["completion"] + chats
    assert found.sum("tokenmill_cost_total") == pytest.approx(manifest["cost"])
    assert found.sum("tokenmill_jobs_ended_total", status="completed") == 1
    assert found.sum("tokenmill_intake_jobs_total", result="created") == 1
    assert found.all("tokenmill_workers") == {("tiny",): 1}
    assert found.sum("tokenmill_kv_blocks") > 0
    assert found.names >= NAMES - SELDOM, "serve reports all metrics"
    # The other format and the other port report the same.
    other = scrape(f"{url}/metrics", openmetrics=True)
    port = scrape(metrics_url(processes, served))
    for name in ("tokenmill_committed_rows_total", "tokenmill_tokens_total", "tokenmill_step_rows_total"):
        assert other.all(name) == port.all(name) == found.all(name)


@pytest.mark.exhaustive
def test_each_process_of_an_installation_exports_exactly_its_own_metrics(
    processes: Processes, redis_server: RedisServer, model_folder: Path, chat: Any, folder: Path
) -> None:
    processes.variables |= {"TOKENMILL_REDIS_URL": redis_server.url, "TOKENMILL_ROOT": str(folder / "root")}
    variables = {"TOKENMILL_METRICS__PORT": "0"}
    null = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", 8)
    numbers = {
        "gateway": processes.start("-m", "tokenmill", "gateway", "--port", 0),
        "worker": processes.start(*null, **variables),
        "dispatcher": processes.start("-m", "tokenmill", "dispatcher", "--metrics-port", 0),
        "intake": processes.start("-m", "tokenmill", "intake", **variables, TOKENMILL_CELERY__QUEUES='{"q": "t"}'),
    }
    gateway = processes.url(numbers["gateway"])
    urls = {name: metrics_url(processes, number) for name, number in numbers.items() if name != "gateway"}
    urls["gateway"] = f"{gateway}/metrics"
    client = OpenAI(base_url=f"{gateway}/v1", timeout=HANG_SECONDS, api_key="none")
    wait_for(lambda: client.models.list().data, "no worker is up")
    file = client.files.create(
        file=("in.jsonl", as_jsonl([chat(f"r{n}", f"number {n}", max_tokens=9) for n in range(40)])), purpose="batch"
    )
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    assert ended(client, batch.id).status == "completed"
    client.chat.completions.create(**chat("", "hello", max_tokens=5)["body"])
    (manifest,) = manifests(folder / "root")
    completion = manifest["usage"]["completion"]

    def answered(found: Scrape) -> bool:
        return sum(found.all("tokenmill_tokens_total", kind="completion").values()) == completion + 5

    of_worker = scrape_until(urls["worker"], answered)
    of_gateway = scrape_until(urls["gateway"], answered)
    of_dispatcher = scrape_until(urls["dispatcher"], lambda found: found.sum("tokenmill_jobs_ended_total") == 1)
    of_intake = scrape(urls["intake"])
    scrapes = {"worker": of_worker, "gateway": of_gateway, "dispatcher": of_dispatcher, "intake": of_intake}
    for name, found in scrapes.items():
        ours = {name for name in found.names if name.startswith("tokenmill_")}
        allowed = {metric.name for metric in METRICS if name in metric.by}
        assert ours <= allowed, f"{name} reports metrics that the table doesn't list for it"
        assert found.sum("process_resident_memory_bytes") > 0
    # Each row is reported once in the installation, and the gateway's metrics of the worker are the worker's own.
    assert of_dispatcher.sum("tokenmill_committed_rows_total", status="succeeded") == 40
    assert of_dispatcher.sum("tokenmill_committed_tokens_total", kind="completion") == completion
    assert of_dispatcher.all("tokenmill_workers") == of_gateway.all("tokenmill_workers") == {("tiny",): 1}
    assert "tokenmill_committed_rows_total" not in of_gateway.names
    ((worker,),) = of_gateway.all("tokenmill_step_rows_total", model="tiny")
    for metric in METRICS:
        if metric.kind == "counter" and "worker" in metric.by and metric.name != "tokenmill_worker_seconds_total":
            assert of_gateway.all(metric.name, worker=worker) == of_worker.all(metric.name), metric.name
    assert of_gateway.sum("tokenmill_http_requests_total", route="/v1/batches", method="POST", code="200") == 1
    # While Redis is away, a process still reports its own metrics.
    redis_server.kill()
    left = scrape(urls["gateway"])
    assert left.sum("tokenmill_answers_total", result="answered") == 1
    assert "tokenmill_workers" not in left.names


@pytest.mark.exhaustive
def test_the_metrics_port_serves_nothing_else_and_withstands_silent_clients(
    processes: Processes, redis_server: RedisServer, folder: Path
) -> None:
    processes.variables |= {"TOKENMILL_REDIS_URL": redis_server.url, "TOKENMILL_ROOT": str(folder / "root")}
    number = processes.start("-m", "tokenmill", "dispatcher", "--metrics-port", 0)
    url = metrics_url(processes, number)
    base = url.removesuffix("/metrics")
    host, port = base.removeprefix("http://").split(":")
    assert host == "127.0.0.1", "only this machine can scrape it by default"
    for path in ("/", "/v1/status", "/metrics/x", "/..%2fmetrics"):
        assert httpx2.get(base + path).status_code == 404
    assert httpx2.post(url).status_code == 501
    silent = [socket.create_connection((host, int(port))) for _ in range(12)]
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda _: scrape(url).names, range(9)))
    crowd = [socket.create_connection((host, int(port))) for _ in range(30)]
    for one in crowd[10:]:
        one.settimeout(5)
        assert one.recv(1) == b"", "all slots are taken"
    for one in [*silent, *crowd]:
        one.close()
    wait_until_scrapable(url)
    processes.running[number].terminate()
    assert processes.running[number].wait(HANG_SECONDS) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def wait_until_scrapable(url: str) -> None:
    """The slots of closed connections are soon free again."""
    until = time.monotonic() + HANG_SECONDS
    while True:
        try:
            assert scrape(url).sum("tokenmill_build_info") == 1
            return
        except httpx2.TransportError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_port_in_use_is_reported_in_one_line(tokenmill: Any, redis_server: RedisServer, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKENMILL_REDIS_URL", redis_server.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = tokenmill("dispatcher", "--root", "root", "--metrics-port", taken.getsockname()[1])
    assert refused.code == 1
    assert "choose another --metrics-port" in refused.error
