"""`tokenmill submit`: to a folder, a bucket and a topic, each with its real ingest source."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import KafkaAdminClient, NewTopic

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ingest.files.folder_inbox import FolderInbox
from pipeline.ingest.files.s3_inbox import BucketInbox
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.intake import Intake
from pipeline.inputs.open import pin_uri
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import World
from schemas.jobs.job import Closing, Job, Tier
from schemas.models import CatalogEntry
from tests.pipeline.made_jobs import PIN
from tests.servers.kafka import KafkaBroker
from tests.servers.moto import MotoServer
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.root import Root
from tokenmill.services.intake import ingest_services
from tokenmill.settings import read_settings


@pytest.fixture
def source(write_lines: Callable[..., Path], chat: Any) -> Path:
    return write_lines(*[chat(f"r{n}") for n in range(5)], name="rows.jsonl")


@contextmanager
def doing(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """`work` on a thread while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def job_at(world: World, job_id: str) -> Job:
    job = JobLedger(world.store, f"{JOBS}{job_id}/").find_job()
    assert job is not None, f"no job {job_id}, but {list(world.store.folders(JOBS))}"
    return job


def publish(world: World) -> None:
    Catalog(world.store).publish(CatalogEntry(pin=PIN, max_model_len=2_048))


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """A root whose incoming/ is watched."""
    (folder / "root" / "incoming").mkdir(parents=True)
    with FolderStore(folder / "root") as store:
        made = World(store, SystemClock(), SystemRandomness(), store.scratch)
        publish(made)
        yield made


def folder_ingest(world: World) -> FileIngestSource:
    assert isinstance(world.store, FolderStore)
    return FileIngestSource(FolderInbox(world.store, world.clock, settle=0.0), Intake(world), world)


def test_a_folder_gets_the_file_whole_with_its_options_and_the_id_is_the_jobs(
    world: World, source: Path, tokenmill: Any
) -> None:
    ingest = folder_ingest(world)
    options = ("--tier", "bulk", "--deadline", "6h", "--model", "tiny", "--limit", 3, "--seed", 7)
    sent = [
        tokenmill("submit", source, "--to", "root", *options, "--truncate-prompt", "newline"),
        tokenmill("submit", source, "--to", "root", "--json"),
    ]
    assert [one.code for one in sent] == [0, 0]
    ids = [sent[0].out.strip(), sent[1].json()["job"]]
    assert {path.name[0] for path in (Path("root") / "incoming").iterdir()} == {"r"}, "nothing hidden is left"
    ingest.sweep()
    jobs = [job_at(world, job_id) for job_id in ids]
    assert len(set(ids)) == 2, "what is submitted twice is two jobs"
    assert (jobs[0].tier, jobs[0].settings.limit, jobs[0].settings.seed) == (Tier.BULK, 3, 7)
    assert [job.settings.truncate_prompt for job in jobs] == ["newline", None]
    assert jobs[0].deadline is not None
    assert (jobs[0].deadline - jobs[0].created_at).total_seconds() == 6 * 3_600
    assert Path(jobs[1].input.files[0].uri).read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_watching_ends_with_the_job(world: World, source: Path, tokenmill: Any) -> None:
    ingest, beats = folder_ingest(world), MemoryHeartbeats(world.clock, 10.0)
    dispatcher = Dispatcher(world, MemoryQueue(), beats, settings=DispatchSettings())
    controller = JobController(world, dispatcher, settings=JobControllerSettings(0.01, 0.05))

    def work(stop: threading.Event) -> None:
        while not stop.wait(0.1):
            ingest.sweep()
            for prefix in world.store.folders(JOBS):  # there is no worker: the job's rows end as cancelled
                if (ledger := JobLedger(world.store, prefix)).planned_parts() is not None:
                    ledger.create_closing(Closing(kind="cancel", at=world.clock.now()))

    with doing(work), doing(controller.run):
        ended = tokenmill("submit", source, "--to", "root", "--watch")
    assert ended.code == 0
    assert "waits to be taken" in ended.err
    assert "5 expired or cancelled" in ended.err.splitlines()[-1]


@pytest.mark.slow
def test_a_refused_file_ends_the_watching_with_its_dead_letter(world: World, source: Path, tokenmill: Any) -> None:
    ingest = folder_ingest(world)

    def work(stop: threading.Event) -> None:
        while not stop.wait(0.1):
            ingest.sweep()

    with doing(work):
        ended = tokenmill("submit", source, "--to", "root", "--model", "gpt-9", "--watch")
    assert ended.code == 1
    (dead_letter,) = tokenmill("deadletters", "list", "--root", "root", "--json").json()["dead_letters"]
    assert f"'tokenmill deadletters show {dead_letter['id']} --root " in ended.error


@pytest.mark.parametrize(
    ("to", "given", "why"),
    [
        ("http://127.0.0.1:8000?x=1", "rows.jsonl", "has a query"),
        ("nowhere", "rows.jsonl", "nowhere: no such folder"),
        ("unwatched", "rows.jsonl", "no process watches it"),
        ("root", "nothing.jsonl", "nothing.jsonl: no such file"),
        ("root", "root", "root: is a folder"),
        ("root", "notes.txt", "notes"),
        ("root", "s3://a/b.jsonl", "only a local file can be dropped"),
        ("ftp://a/b", "rows.jsonl", "is no target"),
        ("kafka:///topic", "rows.jsonl", "give kafka://HOST"),
        ("kafka://user:secret@host/topic", "rows.jsonl", "carries credentials"),
    ],
)
@pytest.mark.slow
def test_an_invalid_submission_is_an_error_of_one_line(
    world: World, source: Path, folder: Path, tokenmill: Any, to: str, given: str, why: str
) -> None:
    (folder / "unwatched").mkdir()
    (folder / "notes.txt").write_text("x")
    ended = tokenmill("submit", given, "--to", to)
    assert ended.code == 1
    assert why in ended.error
    assert "secret" not in ended.err
    assert list((folder / "root" / "incoming").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("versioned", [False, True])
def test_a_bucket_gets_the_object_with_its_options_and_the_id_is_the_jobs(
    s3_server: MotoServer, unique_name: Callable[[], str], source: Path, tokenmill: Any,
    monkeypatch: pytest.MonkeyPatch, versioned: bool,
) -> None:  # fmt: skip
    bucket = unique_name()[-40:].strip("-")
    s3_server.make_bucket(bucket)
    if versioned:
        s3_server.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    settings = S3Settings(
        endpoint=s3_server.endpoint, region=s3_server.region,
        access_key=s3_server.access_key, secret_key=s3_server.secret_key,
    )  # fmt: skip
    for name, value in (
        ("AWS_ACCESS_KEY_ID", s3_server.access_key), ("AWS_SECRET_ACCESS_KEY", s3_server.secret_key),
        ("AWS_DEFAULT_REGION", s3_server.region), ("TOKENMILL_S3__ENDPOINT", s3_server.endpoint),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    target = f"s3://{bucket}/team/a"
    with S3Store(bucket, "team/a", S3Connection(settings)) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        publish(world)
        sent = tokenmill("submit", source, "--to", target, "--tier", "bulk", "--deadline", "30m", "--json").json()
        inbox = BucketInbox(S3Connection(settings), bucket, "team/a/incoming/")
        FileIngestSource(inbox, Intake(world), world).sweep()
        job = job_at(world, sent["job"])
        assert (job.tier, job.input.uri) == (Tier.BULK, sent["submitted"])
        assert job.deadline is not None
        assert store.read(job.input.uri.removeprefix(f"{target}/")) == source.read_bytes()
        JobLedger(store, f"{JOBS}{job.id}/").create_closing(Closing(kind="cancel", at=world.clock.now()))
    refused = tokenmill("submit", source, "--to", target, "--model", "日本")
    assert "ASCII" in refused.error


@pytest.mark.slow
def test_a_topic_gets_a_record_and_the_id_is_the_jobs(
    kafka_broker: KafkaBroker, unique_name: Callable[[], str], world: World, source: Path, folder: Path, tokenmill: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = unique_name()[-40:].strip("-")
    admin = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap)
    admin.create_topics([NewTopic(f"{name}.{kind}", 1, 1) for kind in ("requests", "jobs", "results", "deadletter")])
    admin.close()
    for key, value in (
        ("BOOTSTRAP_SERVERS", f'["{kafka_broker.bootstrap}"]'), ("TOPIC_PREFIX", name), ("IDEMPOTENCE", "false"),
        ("SESSION_TIMEOUT_SECONDS", "2"), ("URI_PREFIXES", json.dumps({"default": [f"file://{folder}/"]})),
    ):  # fmt: skip
        monkeypatch.setenv(f"TOKENMILL_KAFKA__{key}", value)
    sent = tokenmill(
        "submit", source, "--to", f"kafka://{kafka_broker.bootstrap}/{name}.jobs", "--tier", "bulk", "--json"
    ).json()
    root = Root(str(folder / "root"), world, None)
    assert root.pin(str(source)) == pin_uri(str(source))
    with doing(ingest_services(root, read_settings())["kafka"]):
        wait_for(lambda: list(world.store.folders(JOBS)), "no job was made")
    assert job_at(world, sent["job"]).tier is Tier.BULK
    assert sent["submitted"].endswith(f"/{name}.jobs/0@0")
