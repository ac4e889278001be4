"""`/metrics` of a real gateway, compared with the requests that it served."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.gateway.http.api_keys import Scope
from pipeline.ports import WorkerState
from schemas.experiments import SliceCounts
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.workers.metrics import (
    CacheTierMetrics,
    ExperimentMetrics,
    GpuMetrics,
    HistogramSample,
    SloMetrics,
    SloWeights,
    SpeculationMetrics,
    TierMetrics,
    WorkerMetrics,
)
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.made_jobs import PIN
from tests.pipeline.observability.scrapes import Scrape, scrape
from tests.waiting import HANG_SECONDS

CHAT = "/v1/chat/completions"
REQUEST = {"model": PIN.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


def scrape_gateway(harness: HttpHarness, key: str | None = None) -> Scrape:
    return scrape(f"{harness.url}/metrics", key)


def scrape_when(harness: HttpHarness, so: Callable[[Scrape], bool]) -> Scrape:
    until = time.monotonic() + HANG_SECONDS
    while not so(found := scrape_gateway(harness)):
        assert time.monotonic() < until, found.families
        time.sleep(0.02)
    return found


def batch(harness: HttpHarness, data: bytes, **more: Any) -> Any:
    client = harness.client()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more)


@pytest.mark.slow
def test_metrics_require_their_scope_where_keys_are_required(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as anonymous:
        assert anonymous.get("/metrics").status_code == 200
        keys = {scope: harness.keys.create("acme", (scope,))[1] for scope in Scope}
        assert anonymous.get("/metrics").status_code == 401
        for scope, key in keys.items():
            with harness.http(key) as http:
                status = http.get("/metrics").status_code
            assert status == (200 if scope in (Scope.METRICS, Scope.ADMIN) else 403), scope
        with harness.http(keys[Scope.METRICS]) as http:
            assert http.get("/v1/status").status_code == 403, "a key for it is good for nothing else"


def test_a_page_of_another_site_gets_no_data(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        assert http.get("/metrics", headers={"Origin": "https://evil.example"}).status_code == 403
        assert http.get("/metrics", headers={"Origin": harness.url}).status_code == 200


@pytest.mark.slow
def test_rows_and_tokens_are_those_of_the_manifests(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        jobs = [batch(harness, lines(23)), batch(harness, lines(7))]
        client = harness.client()
        options = {"extra_body": {"tokenmill": {"on_invalid": "row", "tier": "bulk"}}}
        jobs.append(batch(harness, lines(4) + b"not json\n", **options))
        until = time.monotonic() + HANG_SECONDS
        while any(client.batches.retrieve(job.id).status != "completed" for job in jobs):
            assert time.monotonic() < until
            time.sleep(0.02)
        found = scrape_when(harness, lambda seen: sum(seen.all("tokenmill_jobs_ended_total").values()) == 3)

        manifests = [harness.ledger(job.id).manifest() for job in jobs]
        for tier, ended in (("standard", manifests[:2]), ("bulk", manifests[2:])):
            for status in ("succeeded", "failed", "expired", "cancelled"):
                expected = sum(getattr(one.counts, status) for one in ended if one is not None)
                assert found.sum("tokenmill_committed_rows_total", tier=tier, status=status) == expected
            for kind in Usage.model_fields:
                expected = sum(getattr(one.usage, kind) for one in ended if one is not None)
                assert found.sum("tokenmill_committed_tokens_total", tier=tier, kind=kind) == expected
            assert found.sum("tokenmill_jobs_ended_total", tier=tier, status="completed") == len(ended)
            assert found.sum("tokenmill_job_seconds_count", tier=tier) == len(ended)
        assert found.sum("tokenmill_committed_rows_total") == 23 + 7 + 5
        assert found.sum("tokenmill_committed_tokens_total", kind="completion") > 0
        assert set(found.all("tokenmill_committed_tokens_total", kind="prompt", tier="standard")) <= {
            (PIN.name,), ("other",)
        }  # fmt: skip
        assert "tokenmill_cost_total" not in found.names, "no price was configured"


@pytest.mark.slow
def test_open_jobs_are_in_the_metrics_until_they_end(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=0) as harness:
        job = batch(harness, lines(30))
        found = scrape_when(harness, lambda seen: sum(seen.all("tokenmill_shards", state="held").values()) == 1)
        assert found.sum("tokenmill_backlog_tokens", model=PIN.name, tier="standard") > 0
        assert found.sum("tokenmill_jobs", tier="standard", status="in_progress") == 1
        assert found.sum("tokenmill_jobs_ended_total") == 0, (
            "scrape_gateway from the start, so that the first one is an increase"
        )
        before = sum(found.all("tokenmill_committed_rows_total", status="succeeded").values())
        assert before == 0
        harness.permits.release(1_000)
        until = time.monotonic() + HANG_SECONDS
        while harness.client().batches.retrieve(job.id).status != "completed":
            assert time.monotonic() < until
            time.sleep(0.02)
        found = scrape_when(harness, lambda seen: not seen.all("tokenmill_backlog_tokens"))
        assert not found.all("tokenmill_jobs")
        assert not found.all("tokenmill_oldest_waiting_seconds")


@pytest.mark.slow
def test_the_age_of_a_job_without_a_worker_grows(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=0) as harness:
        batch(harness, lines(10))
        scrape_when(harness, lambda seen: sum(seen.all("tokenmill_shards", state="held").values()) == 1)
        batch(harness, lines(10))  # the worker has its hands full
        scrape_when(harness, lambda seen: bool(seen.all("tokenmill_oldest_waiting_seconds")))
        harness.clock.ahead = 500.0
        found = scrape_when(harness, lambda seen: seen.sum("tokenmill_oldest_waiting_seconds") > 499)
        assert found.sum("tokenmill_oldest_waiting_seconds", tier="standard") < 530


@pytest.mark.slow
def test_a_job_that_fails_as_a_whole_is_counted(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        batch(harness, lines(2) + b"not json\n")
        found = scrape_when(harness, lambda seen: seen.sum("tokenmill_jobs_ended_total") == 1)
        assert found.sum("tokenmill_jobs_ended_total", status="failed", tier="standard") == 1


@pytest.mark.slow
def test_responses_are_counted_by_result(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        cached = {**REQUEST, "temperature": 0, "extra_body": {"tokenmill": {"cache": True}}}
        for _ in range(3):
            client.chat.completions.create(**cached)
            time.sleep(0.1)  # for the response to be cached
        list(client.chat.completions.create(**REQUEST, stream=True))
        harness.worker.stop_taking()
        going = harness.http().stream("POST", CHAT, json={**REQUEST, "stream": True, "max_tokens": 100})
        harness.worker.pause = 0.05
        harness.worker.hold.clear()
        with going as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            assert scrape_gateway(harness).sum("tokenmill_inference_requests", state="open") == 1
        found = scrape_when(harness, lambda seen: seen.sum("tokenmill_answers_total", result="cancelled") == 1)
        assert found.all("tokenmill_answers_total", tier="interactive") == {
            ("answered",): 2, ("cached",): 2, ("cancelled",): 1, ("failed",): 0,
        }  # fmt: skip
        assert found.sum("tokenmill_answer_seconds_count", tier="interactive") == 2
        assert found.sum("tokenmill_answer_first_token_seconds_count", tier="interactive") == 3
        assert found.sum("tokenmill_inference_requests", state="open") == 0
        assert found.sum("tokenmill_inference_requests", state="waiting") == 0


@pytest.mark.slow
def test_request_metrics_are_labelled_by_route_and_never_by_path(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        for number in range(8):
            http.get(f"/v1/files/file-{number}")
            http.get(f"/nothing/{number}")
            http.request(f"MADE{number}", "/v1/files")
        http.get("/v1/models")
        found = scrape_gateway(harness)
        requests = found.all("tokenmill_http_requests_total")
        assert requests["404", "GET", "/v1/files/{file_id}"] == 8
        assert requests["404", "GET", "none"] == 8
        assert requests["405", "other", "/v1/files"] == 8
        assert requests["200", "GET", "/v1/models"] == 1
        assert len(requests) <= 6
        assert found.sum("tokenmill_http_requests_in_progress") == 1, "this one"


WORKER_METRICS = WorkerMetrics(
    model="a",
    seconds=60,
    tiers={
        Tier.INTERACTIVE: TierMetrics(
            running=2, waiting=1, answered=9, failed=1,
            usage=Usage(prompt=90, cached=32, completion=45, drafted=8, accepted=5),
            ttft=HistogramSample(counts=(0, 0, 4, 6), seconds=0.05), itl=HistogramSample(counts=(35,), seconds=0.02),
            whole=HistogramSample(counts=(0, 9), seconds=0.018),
        )
    },
    computed=200, prompt=58, generated=47, recomputed=3, prefix_queried=90, prefix_hits=32,
    steps=HistogramSample(counts=(10, 10), seconds=0.03), step_rows=80, preemptions=2, kv_blocks=100, kv_blocks_used=25,
    expert_load=2.5, rank_load=1.25, lane_open=2, lane_waiting=1, lane_stolen=4, store_outage="no room",
    pace=SloMetrics(
        weights=SloWeights(ttft=1, itl=2, utilisation=0.3, drops=4),
        terms=SloWeights(ttft=0.5, itl=0.25, utilisation=0.1, drops=0.01),
        others=0.75, beside_streams=100, beside_prompts=200, late_first_tokens=1, late_tokens=2, drops=3,
    ),
    experiment=ExperimentMetrics(
        name="e", arm="y", arms={"x": SliceCounts(later_tokens=7, late_tokens=2, seconds=3), "y": SliceCounts(drops=1)},
    ),
    speculation=SpeculationMetrics(drafted=8, accepted=5, gained=-1.5, seconds=0.5),
    cache_tier=CacheTierMetrics(hits=6, rejected=1, bytes_read=600, bytes_written=700, is_on=False),
    host_tier=CacheTierMetrics(hits=8, bytes_read=900, bytes_written=1000),
    gpus=(
        GpuMetrics(
            uuid="GPU-u", device="nvidia3", memory_bytes=80, memory_used_bytes=60, utilization=0.75, power_watts=650.5,
            power_limit_watts=700, temperature_celsius=71, sm_clock_hertz=1_755_000_000,
            throttled=("hw_thermal_slowdown", "sw_power_cap", "of_a_newer_driver"),
        ),
        GpuMetrics(uuid="MIG-v", device="nvidia4", memory_bytes=40),
    ),
)  # fmt: skip


@pytest.mark.slow
def test_the_metrics_of_each_live_worker_are_exposed(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        for name, metrics in (("w1", WORKER_METRICS), ("w2", WorkerMetrics(model="b", generated=7))):
            harness.beats.send_heartbeat(WorkerState(name))
            harness.beats.report_metrics(name, metrics)
        harness.beats.send_heartbeat(WorkerState("w3"))
        found = scrape_gateway(harness)
        one = {"worker": "w1", "model": "a"}
        assert found.all("tokenmill_workers") == {("a",): 1, ("b",): 1, ("other",): 1}
        assert found.all("tokenmill_requests_total", **one) == {
            ("succeeded", "interactive"): 9,
            ("failed", "interactive"): 1,
        }
        assert found.all("tokenmill_tokens_total", tier="interactive", **one) == {
            ("prompt",): 90, ("cached",): 32, ("completion",): 45, ("drafted",): 8, ("accepted",): 5,
        }  # fmt: skip
        assert found.all("tokenmill_engine_tokens_total", **one) == {
            ("prompt",): 58, ("cached",): 32, ("generated",): 47, ("recomputed",): 3, ("drafted",): 8, ("accepted",): 5,
        }  # fmt: skip
        for name, value in {
            "prefix_queried_tokens_total": 90, "prefix_hit_tokens_total": 32, "step_rows_total": 80,
            "step_tokens_total": 200, "step_seconds_count": 20, "step_seconds_sum": 0.03, "running_requests": 2,
            "waiting_requests": 1, "kv_blocks": 100, "kv_blocks_used": 25, "preemptions_total": 2,
            "time_to_first_token_seconds_count": 10, "time_to_first_token_seconds_sum": 0.05,
            "inter_token_seconds_count": 35, "request_seconds_count": 9, "slo_objective": 0.5 + 0.5 + 0.03 + 0.04,
            "slo_batch_ratio": 0.75, "store_outage": 1, "speculation_gained_tokens": -1.5,
            "speculation_compared_seconds_total": 0.5, "kv_tier_rejected_blocks_total": 1,
            "kv_tier_off": 1, "lane_stolen_requests_total": 4,
        }.items():  # fmt: skip
            assert found.sum(f"tokenmill_{name}", **one) == pytest.approx(value), name
        assert found.all("tokenmill_lane_requests", **one) == {("open",): 2, ("waiting",): 1}
        assert found.all("tokenmill_expert_load", **one) == {("expert",): 2.5, ("rank",): 1.25}
        for name, value in {
            "memory_used_bytes": 60, "utilization_ratio": 0.75, "power_watts": 650.5, "power_limit_watts": 700,
            "temperature_celsius": 71, "sm_clock_hertz": 1_755_000_000,
        }.items():  # fmt: skip
            assert found.all(f"tokenmill_gpu_{name}", **one) == {("nvidia3", "GPU-u"): value}
        assert found.all("tokenmill_gpu_memory_bytes", **one) == {("nvidia3", "GPU-u"): 80, ("nvidia4", "MIG-v"): 40}
        assert found.all("tokenmill_gpu_throttled", uuid="GPU-u", device="nvidia3", **one) == {
            ("sw_power_cap",): 1, ("hw_slowdown",): 0, ("sync_boost",): 0, ("sw_thermal_slowdown",): 0,
            ("hw_thermal_slowdown",): 1, ("hw_power_brake_slowdown",): 0,
        }  # fmt: skip
        assert found.all("tokenmill_gpu_throttled", uuid="MIG-v", **one) == {}
        assert found.all("tokenmill_kv_tier_hits_total", **one) == {("disk",): 6, ("host",): 8}
        assert found.all("tokenmill_kv_tier_bytes_total", medium="disk", **one) == {("read",): 600, ("written",): 700}
        assert found.all("tokenmill_kv_tier_bytes_total", medium="host", **one) == {("read",): 900, ("written",): 1000}
        assert found.all("tokenmill_slo_weight", **one) == {
            ("ttft",): 1,
            ("itl",): 2,
            ("utilisation",): 0.3,
            ("drops",): 4,
        }
        assert found.all("tokenmill_slo_term", **one) == {
            ("ttft",): 0.5, ("itl",): 0.25, ("utilisation",): 0.1, ("drops",): 0.01,
        }  # fmt: skip
        assert found.all("tokenmill_slo_batch_tokens", **one) == {("streams",): 100, ("prompts",): 200}
        assert found.all("tokenmill_slo_missed_total", **one) == {("ttft",): 1, ("itl",): 2, ("deadline",): 3}
        assert found.all("tokenmill_experiment_arm", **one) == {("x", "e"): 0, ("y", "e"): 1}
        assert found.all("tokenmill_experiment_seconds_total", **one) == {("x", "e"): 3, ("y", "e"): 0}
        events = found.all("tokenmill_experiment_events_total", experiment="e", **one)
        assert len(events) == 16
        assert {key: count for key, count in events.items() if count} == {
            ("x", "later_tokens"): 7, ("x", "late_tokens"): 2, ("y", "drops"): 1,
        }  # fmt: skip
        ends = found.all("tokenmill_time_to_first_token_seconds_bucket", tier="interactive", **one)
        assert (ends["0.002",], ends["0.003",], ends["0.005",]) == (0, 4, 10)
        other = {"worker": "w2"}
        assert found.sum("tokenmill_engine_tokens_total", kind="generated", **other) == 7
        assert found.all("tokenmill_store_outage", **other) == {("b",): 0}
        for name in (
            "kv_blocks", "time_to_first_token_seconds_count", "slo_weight", "speculation_gained_tokens", "kv_tier_off",
            "experiment_arm",
            "gpu_memory_bytes",
        ):  # fmt: skip
            assert found.all(f"tokenmill_{name}", **other) == {}, f"{name} is not known"
        assert found.all("tokenmill_step_rows_total", worker="w3") == {}
