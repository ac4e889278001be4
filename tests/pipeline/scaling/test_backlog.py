"""The backlog of each model, and its metrics in CloudWatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.intake import Intake, JobDraft
from pipeline.inputs.open import pin_uri
from pipeline.ledger.ledger import JOB, JOBS
from pipeline.models.catalog import Catalog
from pipeline.ports import WorkerState, World
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.scaling.backlog import BacklogMetrics, BacklogReader, ModelBacklog
from pipeline.scaling.cloudwatch import CloudWatch
from pipeline.scaling.open_work import OpenJobsIndex, OpenJobSummary
from schemas.jobs.job import Job
from schemas.jobs.job_options import JobOptions
from schemas.jobs.outcome import JobStatus
from schemas.models import CatalogEntry, ModelPin
from tests.servers.moto import MotoServer

MODEL = ModelPin(name="m", source="m", digest="sha256:" + "a" * 64, dtype="float32")
OTHER = ModelPin(name="other", source="o", digest="sha256:" + "b" * 64, dtype="float32")
LINE = (
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", '
    b'"body": {"model": "%s", "prompt": "x", "max_tokens": 10}}\n'
)


class ScalingHarness:
    """A root on a folder, with two models in its catalog."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder / "root")
        self.world = World(self.store, SystemClock(), SystemRandomness(), self.store.scratch)
        self.heartbeats = MemoryHeartbeats(self.world.clock, lifetime=60.0)
        self.folder = folder
        for pin in (MODEL, OTHER):
            Catalog(self.store).publish(CatalogEntry(pin=pin, max_model_len=512))
        self.reader = BacklogReader(self.world, self.heartbeats, assumed=100.0)

    def submit(self, name: str, *models: str) -> Job:
        """A job whose rows name these models."""
        path = self.folder / f"{name}.jsonl"
        path.write_bytes(b"".join(LINE % (row, models[row % len(models)].encode()) for row in range(400)))
        options = JobOptions(model=models[0]) if len(models) == 1 else JobOptions()
        return Intake(self.world).accept(JobDraft(pin_uri(str(path)), options, "default", name)).job

    def send_heartbeat(self, name: str, pin: ModelPin, speed: float | None) -> None:
        self.heartbeats.send_heartbeat(WorkerState(name, frozenset({pin.key}), tokens_per_second=speed))

    def of(self, model: str) -> ModelBacklog:
        return next(found for found in self.reader.read().models if found.model == model)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ScalingHarness]:
    made = ScalingHarness(tmp_path)
    yield made
    made.store.close()


def test_given_no_job_and_no_worker_then_each_model_of_the_catalog_has_nothing_left(harness: ScalingHarness) -> None:
    metrics = harness.reader.read()
    assert metrics.open_jobs == 0
    assert [(found.model, found.tokens, found.workers, found.seconds) for found in metrics.models] == [
        ("m", 0, 0, 0.0),
        ("other", 0, 0, 0.0),
    ]


def test_given_a_job_without_workers_then_its_seconds_are_those_of_an_assumed_worker(harness: ScalingHarness) -> None:
    job = harness.submit("one", "m")
    assert harness.reader.read().open_jobs == 1
    assert harness.of("m").tokens == job.input.size // 4
    assert harness.of("m").seconds == pytest.approx(job.input.size // 4 / 100)
    assert harness.of("other").tokens == 0


def test_given_workers_that_measured_then_seconds_are_by_their_mean_and_not_by_their_number(
    harness: ScalingHarness,
) -> None:
    tokens = harness.submit("one", "m").input.size // 4
    harness.send_heartbeat("w1", MODEL, 500.0)
    harness.send_heartbeat("w2", MODEL, 300.0)
    harness.send_heartbeat("w3", MODEL, None)  # has only just been started
    harness.send_heartbeat("w4", OTHER, 9_000.0)

    found = harness.of("m")

    assert (found.workers, found.tokens_per_second) == (3, 400.0)
    assert found.seconds == pytest.approx(tokens / 400)


def test_given_workers_that_left_then_their_throughput_is_retained(harness: ScalingHarness) -> None:
    harness.submit("one", "m")
    harness.send_heartbeat("w1", MODEL, 500.0)
    assert harness.of("m").workers == 1
    harness.heartbeats.leave("w1")
    assert (harness.of("m").workers, harness.of("m").tokens_per_second) == (0, 500.0)


def test_given_a_job_of_two_models_then_it_waits_for_both(harness: ScalingHarness) -> None:
    tokens = harness.submit("both", "m", "other").input.size // 4
    assert (harness.of("m").tokens, harness.of("other").tokens) == (tokens, tokens)


def test_given_a_job_of_adapters_then_it_waits_for_the_workers_of_their_model(harness: ScalingHarness) -> None:
    adapters = [MODEL.with_adapter(name, name, name * 32) for name in ("a", "b")]
    for pin in adapters:
        Catalog(harness.store).publish(CatalogEntry(pin=pin, max_model_len=512))
    both = frozenset({MODEL.key, adapters[0].key})
    harness.heartbeats.send_heartbeat(WorkerState("w", both, tokens_per_second=50.0))
    job = harness.submit("job", "a", "b", "m")
    assert {found.model for found in harness.reader.read().models} == {"m", "other"}
    assert harness.of("m") == ModelBacklog("m", job.input.size // 4, 1, 50.0)
    assert job.models[0] == MODEL
    assert job.only_model is None
    assert harness.submit("alone", "a").only_model == "a"


def test_given_a_job_without_a_dispatcher_then_it_is_open_and_validating(harness: ScalingHarness) -> None:
    job = harness.submit("one", "m")
    assert OpenJobsIndex(harness.store).read().jobs == [OpenJobSummary(job, JobStatus.VALIDATING, job.input.size // 4)]


def test_given_a_job_of_many_files_then_its_cached_order_does_not_grow_with_them(harness: ScalingHarness) -> None:
    job = harness.submit("one", "m")
    file = job.input.files[0]
    many = job.model_copy(update={"input": job.input.model_copy(update={"files": (file,) * 5})})
    harness.store.replace(f"{JOBS}{job.id}/{JOB}", many.to_json())
    (found,) = OpenJobsIndex(harness.store).read().jobs
    assert (len(found.job.input.files), found.left) == (1, 5 * file.size // 4)


def test_given_more_jobs_than_one_read_returns_then_it_reports_more(harness: ScalingHarness) -> None:
    harness.submit("one", "m")
    harness.submit("two", "m")
    assert not OpenJobsIndex(harness.store).read().more
    found = OpenJobsIndex(harness.store, max_jobs=1).read()
    assert (len(found.jobs), found.more) == (1, True)
    assert len(OpenJobsIndex(harness.store, max_jobs=None).read().jobs) == 2


@pytest.fixture
def cloudwatch(s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    return s3_server.client("cloudwatch")


def published(client: Any, namespace: str, name: str, **dimensions: str) -> float | None:
    """The largest value of the last minutes."""
    now = datetime.now(UTC)
    answer = client.get_metric_statistics(
        Namespace=namespace,
        MetricName=name,
        Dimensions=[{"Name": key, "Value": value} for key, value in dimensions.items()],
        StartTime=now - timedelta(minutes=10),
        EndTime=now + timedelta(minutes=10),
        Period=3600,
        Statistics=["Maximum"],
    )
    values = [float(point["Maximum"]) for point in answer["Datapoints"]]
    return max(values) if values else None


@pytest.mark.slow
def test_given_metrics_when_published_then_cloudwatch_has_them_by_installation_and_model(
    cloudwatch: Any, unique_name: Callable[[], str]
) -> None:
    space = unique_name()
    metrics = BacklogMetrics(3, (ModelBacklog("m", 5_000, 2, 100.0), ModelBacklog("owner/name", 0, 0, 10.0)))

    CloudWatch(space, "here", "us-east-1").put(metrics)

    assert published(cloudwatch, space, "OpenJobs", Installation="here") == 3
    assert published(cloudwatch, space, "BacklogSeconds", Installation="here", Model="m") == 50
    assert published(cloudwatch, space, "BacklogTokens", Installation="here", Model="m") == 5_000
    assert published(cloudwatch, space, "Workers", Installation="here", Model="m") == 2
    assert published(cloudwatch, space, "TokensPerSecond", Installation="here", Model="m") == 100
    assert published(cloudwatch, space, "BacklogSeconds", Installation="here", Model="owner/name") == 0
    assert published(cloudwatch, space, "BacklogSeconds", Installation="elsewhere", Model="m") is None


@pytest.mark.slow
def test_given_more_values_than_one_request_takes_then_all_are_published(
    cloudwatch: Any, unique_name: Callable[[], str]
) -> None:
    space = unique_name()
    metrics = BacklogMetrics(0, tuple(ModelBacklog(f"m{number}", number, 0, 1.0) for number in range(300)))
    CloudWatch(space, "here", "us-east-1").put(metrics)
    assert published(cloudwatch, space, "BacklogTokens", Installation="here", Model="m299") == 299


def test_given_no_cloudwatch_when_publishing_then_the_service_is_unavailable(
    cloudwatch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    with pytest.raises(ServiceUnavailable, match="can't tell the backlog"):
        CloudWatch("space", "here", "us-east-1").put(BacklogMetrics(0, ()))
