"""`tokenmill autoscale` and `tokenmill simulate` as they are typed."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.heartbeats import RedisHeartbeats
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.models.catalog import Catalog
from pipeline.ports import WorkerState, World
from schemas.jobs.job_options import JobOptions
from schemas.models import CatalogEntry, ModelPin
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS, wait_for

PIN = ModelPin(name="owner/m", source="m", digest="sha256:" + "a" * 64, dtype="float32")
TOKENS_PER_SECOND = 0.02


@pytest.fixture
def root(folder: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root with a model, a job for it, and a live worker that is slow: hours of work."""
    monkeypatch.setenv("TOKENMILL_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TOKENMILL_ROOT", str(folder / "root"))
    source = folder / "in.jsonl"
    line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"model": "owner/m", "prompt": "x"}}
    source.write_text((json.dumps(line) + "\n") * 40)
    with FolderStore(folder / "root") as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        Catalog(store).publish(CatalogEntry(pin=PIN, max_model_len=64))
        Intake(world).accept(JobDraft(pin_uri(str(source)), JobOptions(model="owner/m"), "default", "job"))
    beats, stop = RedisHeartbeats(RedisSettings(redis_server.url), lifetime=HANG_SECONDS), threading.Event()
    worker = WorkerState("w", frozenset({PIN.key}), tokens_per_second=TOKENS_PER_SECOND)

    def live() -> None:  # a reader judges the last heartbeat by a lifetime of its own
        while not stop.wait(0.5):
            beats.send_heartbeat(worker)

    beats.send_heartbeat(worker)
    thread = threading.Thread(target=live)
    thread.start()
    yield folder / "root"
    stop.set()
    thread.join()
    beats.close()


@pytest.mark.usefixtures("root")
@pytest.mark.slow
def test_given_a_root_when_autoscaled_once_then_each_pool_has_its_line(tokenmill: Any, root: Path) -> None:
    dry = tokenmill("autoscale", "--once", "--dry-run", "--json")
    assert dry.code == 0
    (pool,) = json.loads(dry.out)["pools"]
    assert (pool["pool"], pool["live"], pool["before"]) == ("owner/m", 1, 1)
    assert pool["desired"] == 8, "hours of work, due within an hour"
    assert pool["reason"] == "deadlines"
    assert not (root / "scaling").exists()
    done = tokenmill("autoscale", "--once")
    assert "owner/m: 1 -> 8 workers (deadlines); 1 live" in done.out
    again = tokenmill("autoscale", "--once")
    assert "owner/m: 8 -> 8 workers" in again.out


def metrics_url(processes: Processes, number: int) -> str:
    """The URL of a process's metrics, from its log."""

    def logged_url() -> str | None:
        found = re.search(r"http://[0-9.:]+/metrics", processes.log(number).read_text())
        return None if found is None else found[0]

    return wait_for(logged_url, "no metrics URL is logged") or ""


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
        return json.load(answer) if answer.headers["Content-Type"] == "application/json" else answer.read().decode()


@pytest.mark.usefixtures("root")
@pytest.mark.slow
def test_given_http_when_keda_requests_a_pool_then_it_gets_the_number(processes: Processes) -> None:
    serving = processes.start(
        "-m", "tokenmill", "autoscale", "--adapter", "http", "--metrics-port", 0, "--interval", 1
    )  # fmt: skip
    url = metrics_url(processes, serving)

    def answer() -> Any:
        try:
            return fetched(url.replace("/metrics", "/autoscale/owner%2Fm"))
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    found = wait_for(answer, "nothing was decided")
    assert found["desired"] == 8
    assert fetched(url.replace("/metrics", "/autoscale"))["pools"][0]["pool"] == "owner/m"
    assert 'tokenmill_desired_workers{pool="owner/m"} 8.0' in fetched(url)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetched(url.replace("/metrics", "/autoscale/unknown"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--adapter", "smoke"), "give one of print, cloudwatch, http"),
        (("--once", "--adapter", "http"), "leave out --once"),
        (("--dry-run", "--adapter", "cloudwatch"), "--dry-run only prints"),
    ],
)
def test_given_options_that_contradict_each_other_then_it_is_an_error(
    tokenmill: Any, arguments: tuple[str, ...], says: str
) -> None:
    done = tokenmill("autoscale", "--root", "x", *arguments)
    assert done.code == 2
    assert says in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--adapter", "http"), "TOKENMILL_METRICS__PORT"),
        (("--adapter", "cloudwatch"), "TOKENMILL_CLOUDWATCH__NAMESPACE"),
        ((), "TOKENMILL_REDIS_URL"),
    ],
)
def test_given_a_setting_that_is_missing_then_it_is_named(
    tokenmill: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.delenv("TOKENMILL_REDIS_URL", raising=False)
    done = tokenmill("autoscale", "--root", "x", *arguments)
    assert done.code == 1
    assert says in done.err


@pytest.mark.slow
def test_given_a_pattern_when_it_is_simulated_then_there_are_results_and_a_table(tokenmill: Any) -> None:
    arguments = ("simulate", "--pattern", "bursts", "--gpus", 4, "--hours", 6, "--seed", 3, "--price-per-hour", 2)
    found = json.loads(tokenmill(*arguments, "--json").out)
    assert found["deadlines_met"] <= found["deadlines"] <= found["jobs"] == 72
    assert found["cost"] == pytest.approx(2 * found["worker_hours"])
    assert found["settings"]["scaling"]["max_workers"] == 4
    table = tokenmill(*arguments)
    assert f"{found['deadlines_met']} of {found['deadlines']} met" in table.out
    assert "assumed, not measured" in table.err


REGIONS = f"""
[[region]]
name = "eu"
gpus = 2
price_per_hour = 1

[[region]]
name = "us"
gpus = 3
price_per_hour = {[0.5] * 24}

[tenants]
tenant-0 = ["eu"]
"""


@pytest.mark.slow
def test_given_regions_when_they_are_simulated_then_each_has_results_and_one_alone_is_compared(
    tokenmill: Any, tmp_path: Path
) -> None:
    path = tmp_path / "regions.toml"
    path.write_text(REGIONS)
    arguments = ("simulate", "--regions", path, "--hours", 4, "--seed", 3)
    found = json.loads(tokenmill(*arguments, "--json").out)
    assert [one["name"] for one in found["regions"]] == ["eu", "us"]
    assert found["total"]["jobs"] == sum(one["jobs"] for one in found["regions"]) == 96
    assert found["total"]["cost"] == pytest.approx(
        found["regions"][0]["worker_hours"] + 0.5 * found["regions"][1]["worker_hours"]
    )
    assert found["best_single"] == "eu", "tenant-0 may not leave it"
    assert [one["name"] for one in found["single"]] == ["eu"]
    assert found["settings"]["regions"]["region"][1]["gpus"] == 3
    assert "max_workers" not in found["settings"]["scaling"], "each region has its own"
    table = tokenmill(*arguments)
    assert "eu alone, the best" in table.out
    assert f"{found['total']['cost']:,.2f}" in table.out


def test_given_a_trace_in_regions_then_each_job_stays_in_its_own(tokenmill: Any, tmp_path: Path) -> None:
    path, trace = tmp_path / "regions.toml", tmp_path / "trace.jsonl"
    path.write_text(REGIONS)
    trace.write_text(
        '{"at": 0, "rows": 100, "home": "us", "regions": ["us"], "input_bytes": 5}\n'
        '{"at": 0, "rows": 100, "tenant": "tenant-0"}\n'
    )
    done = tokenmill("simulate", "--regions", path, "--trace", trace, "--json")
    found = json.loads(done.out)
    assert [one["jobs"] for one in found["regions"]] == [1, 1]
    assert (found["single"], found["best_single"]) == ([], None)
    assert "no region may take all jobs" in tokenmill("simulate", "--regions", path, "--trace", trace).err


def test_given_a_file_and_a_measured_worker_then_they_are_simulated(tokenmill: Any, tmp_path: Path) -> None:
    trace, worker = tmp_path / "trace.jsonl", tmp_path / "worker.json"
    trace.write_text('{"at": 0, "rows": 100, "prompt_tokens": 1, "output_tokens": 100}\n')
    decode = [{"batch": 1, "tokens_per_second": 10.0}, {"batch": 10, "tokens_per_second": 100.0}]
    worker.write_text(json.dumps({"name": "slow", "prefill": 1e6, "decode": decode, "cold_start_seconds": 1.0}))
    options = ("--trace", trace, "--worker", worker, "--gpus", 1, "--fixed", "--answer-error", 0, "--json")
    found = json.loads(tokenmill("simulate", *options).out)
    assert (found["worker"], found["requests"]) == ("slow", 100)
    assert found["hours"] * 3_600 == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--trace", "TRACE", "--pattern", "ramp"), 2, "not both"),
        (("--pattern", "sawtooth"), 2, "sawtooth"),
        (("--deadlines", "9", "3"), 2, "give the shortest first"),
        (("--trace", "TRACE"), 1, "has no job"),
        (("--worker", "TRACE"), 1, "can't be read as JSON"),
        (("--regions", "TRACE"), 1, "region: Field required"),
        (("--regions", "TRACE", "--gpus", "2"), 2, "leave out --gpus and --price-per-hour"),
        (("--regions", "TRACE", "--price-per-hour", "2"), 2, "leave out --gpus and --price-per-hour"),
    ],
)
def test_given_wrong_arguments_then_the_simulator_refuses_them(
    tokenmill: Any, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "trace").write_text("")
    done = tokenmill("simulate", *[str(tmp_path / "trace") if one == "TRACE" else one for one in arguments])
    assert done.code == code
    assert says in done.err


def test_given_a_trace_that_names_regions_then_the_simulator_wants_them_described(
    tokenmill: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "rows": 100, "regions": ["us"]}\n')
    done = tokenmill("simulate", "--trace", trace)
    assert done.code == 2
    assert "--regions" in done.err
