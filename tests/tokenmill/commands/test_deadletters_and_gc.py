"""deadletters and gc, as their user and a program see them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer
from kafka.admin import NewTopic

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemRandomness
from pipeline.ingest.celery.tasks import CeleryTasks
from pipeline.ingest.dead_letters import DeadLetters, DeadLetterSource
from pipeline.ingest.files.folder_inbox import FolderInbox
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.intake import Intake
from pipeline.jobs.summaries import find_ledgers
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import World
from schemas.jobs.inputs import InputRef
from schemas.models import CatalogEntry, ModelPin
from tests.pipeline.made_jobs import end_job
from tests.pipeline.simulation import SimulatedClock
from tests.servers.kafka import KafkaBroker

Cli = Callable[..., Any]


@pytest.fixture
def root(folder: Path) -> Path:
    """A root in which one file was refused and another became a job."""
    root = folder / "root"
    (root / "incoming").mkdir(parents=True)
    (root / "incoming" / "bad.jsonl").write_text("{}\n")
    (root / "incoming" / "bad.job.json").write_text('{"model": "unknown"}')
    (root / "incoming" / "good.jsonl").write_text("{}\n")
    with FolderStore(root) as store:
        pin = ModelPin(name="tiny", source="/m", digest="sha256:1", dtype="float32")
        Catalog(store).publish(CatalogEntry(pin=pin, max_model_len=64))
        take(store)
    return root


def take(store: FolderStore) -> int:
    """Ingest the files in the inbox; the number of jobs afterwards."""
    clock = SimulatedClock()
    world = World(store, clock, SystemRandomness(), store.scratch)
    source = FileIngestSource(FolderInbox(store, clock, settle=1.0), Intake(world), world)
    for _ in range(2):
        source.sweep()
        clock.sleep(1.0)
    return sum(1 for _ in find_ledgers(store))


@pytest.mark.slow
def test_given_a_refused_file_when_listed_shown_and_replayed_then_it_is_ingested(tokenmill: Cli, root: Path) -> None:
    table = tokenmill("deadletters", "list", "--root", root)
    assert "model_not_found" in table.out
    assert "bad.jsonl" in table.out
    (listed,) = tokenmill("deadletters", "list", "--root", root, "--json").json()["dead_letters"]
    assert (listed["reason_code"], listed["replays"], listed["ingest_source"]) == ("model_not_found", 0, "folder")

    shown = tokenmill("deadletters", "show", listed["id"], "--root", root)
    assert "model 'unknown' is not served here (tiny)" in shown.out
    assert "bad.jsonl" in tokenmill("deadletters", "show", listed["id"], "--root", root, "--json").json()["place"]

    (root / "incoming" / "bad.job.json").write_text('{"model": "tiny"}')
    assert tokenmill("deadletters", "replay", listed["id"], "--root", root).code == 0
    with FolderStore(root) as store:
        assert take(store) == 2
    (again,) = tokenmill("deadletters", "list", "--root", root, "--json").json()["dead_letters"]
    assert again["replays"] == 1
    twice = tokenmill("deadletters", "replay", listed["id"], "--root", root)
    assert twice.code == 1
    assert "replayed before" in twice.error


@pytest.mark.slow
def test_given_a_record_when_shown_then_its_bytes_and_headers_can_be_read_and_it_needs_kafka(
    tokenmill: Cli, folder: Path
) -> None:
    with FolderStore(folder / "root") as store:
        world = World(store, SimulatedClock(), SystemRandomness(), store.scratch)
        source = DeadLetterSource("kafka", "c/requests", "0-1", datetime(2026, 1, 1, tzinfo=UTC))
        headers = [("tier", b"bulk"), ("raw", b"\xff"), ("none", None)]
        dead_letter = DeadLetters(world).record(source, "invalid_json", "not JSON", b"{broken \xff", headers)
    root = ("--root", folder / "root")
    document = tokenmill("deadletters", "show", dead_letter, *root, "--json").json()
    assert document["original"] == "{broken \\xff"
    assert document["headers"] == [["tier", "bulk"], ["raw", "\\xff"], ["none", None]]
    assert "{broken" in tokenmill("deadletters", "show", dead_letter, *root).out
    unreachable = tokenmill("deadletters", "replay", dead_letter, *root)
    assert (unreachable.code, "name its brokers in TOKENMILL_KAFKA__BOOTSTRAP_SERVERS" in unreachable.error) == (
        1,
        True,
    )
    missing = tokenmill("deadletters", "show", "dl-nothing", *root)
    assert (missing.code, "no dead letter dl-nothing" in missing.error) == (1, True)


@pytest.mark.slow
def test_given_a_record_when_replayed_then_it_is_on_its_topic_again_with_key_and_headers(
    tokenmill: Cli,
    folder: Path,
    kafka_broker: KafkaBroker,
    unique_name: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = unique_name()
    admin = KafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap)
    admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
    admin.close()
    with FolderStore(folder / "root") as store:
        world = World(store, SimulatedClock(), SystemRandomness(), store.scratch)
        source = DeadLetterSource("kafka", f"cluster/{topic}", "0-1", datetime(2026, 1, 1, tzinfo=UTC))
        headers = [("tier", b"bulk"), ("raw", b"\xff")]
        dead_letter = DeadLetters(world).record(source, "invalid_json", "not JSON", b"{broken \xff", headers, key=b"k")
    monkeypatch.setenv("TOKENMILL_KAFKA__BOOTSTRAP_SERVERS", f'["{kafka_broker.bootstrap}"]')
    done = tokenmill("deadletters", "replay", dead_letter, "--root", folder / "root")
    assert done.code == 0, done.err
    consumer = KafkaConsumer(
        topic, bootstrap_servers=kafka_broker.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=10_000
    )
    record = next(iter(consumer))
    consumer.close()
    assert (record.key, record.value, list(record.headers)) == (b"k", b"{broken \xff", headers)


@pytest.mark.slow
def test_given_no_dead_letters_then_a_message_says_so(tokenmill: Cli, folder: Path) -> None:
    (folder / "root").mkdir()
    nothing = tokenmill("deadletters", "list", "--root", folder / "root")
    assert nothing.code == 0
    assert "no dead letters in" in nothing.err
    assert tokenmill("deadletters", "list", "--root", folder / "root", "--json").json() == {
        "dead_letters": [],
        "more": False,
    }
    nowhere = tokenmill("deadletters", "list")
    assert nowhere.code == 1
    assert "no root is named" in nowhere.error


@pytest.mark.slow
def test_given_an_old_job_when_collected_then_its_results_are_removed_and_jobs_show_reports_it(
    tokenmill: Cli, root: Path
) -> None:
    with FolderStore(root) as store:
        (ledger,) = find_ledgers(store)
        job = ledger.job()
        ledger.create("results/part-00000.parquet", b"rows")
        end_job(ledger, datetime.now(UTC) - timedelta(days=3))
    untouched = tokenmill("gc", "--root", root, "--json").json()
    assert untouched["jobs"] == []
    would = tokenmill("gc", "--root", root, "--output-expires-after", "2d", "--dry-run", "--json").json()
    assert would["jobs"] == [job.id]
    assert would["objects"]["results"] >= 1
    part = root / JOBS / job.id / "results" / "part-00000.parquet"
    assert part.exists()

    done = tokenmill("gc", "--root", root, "--output-expires-after", "2d")
    assert done.code == 0
    assert "results of 1 jobs" in done.err
    assert not part.exists()
    with FolderStore(root, read_only=True) as store:
        assert JobLedger(store, f"{JOBS}{job.id}/").tombstone() is not None
    (listed,) = tokenmill("jobs", "list", root, "--json").json()
    assert listed["status"] == "cancelled"
    assert listed["tokenmill"]["results_removed_at"] is not None


@pytest.mark.slow
def test_given_dead_letters_and_tickets_when_collected_then_they_go_by_their_age(
    tokenmill: Cli, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderStore(root) as store:
        clock = SimulatedClock()  # 2026 begins
        world = World(store, clock, SystemRandomness(), store.scratch)
        line = {"custom_id": "a", "url": "/v1/completions"}
        job = CeleryTasks(world, Intake(world), pin_nothing).submit("team", "task", [[line]], {})
        end_job(JobLedger(store, f"{JOBS}{job}/"), clock.now())

    def collected(*more: object) -> dict[str, int]:
        objects: dict[str, int] = tokenmill("gc", "--root", root, "--json", *more).json()["objects"]
        return objects

    never = ("--intake-expires-after", "3650d")
    assert "letter" not in collected(*never)
    assert collected(*never, "--deadletters-expire-after", "3650d") == {}
    monkeypatch.setenv("TOKENMILL_RETENTION__DEADLETTERS", "1d")
    monkeypatch.setenv("TOKENMILL_RETENTION__INTAKE", "3650d")
    assert collected() == {"letter": 1}
    assert tokenmill("deadletters", "list", "--root", root, "--json").json()["dead_letters"] == []
    assert collected("--intake-expires-after", "1d") == {"ticket": 1}
    assert collected("--intake-expires-after", "1d") == {}


def pin_nothing(uri: str) -> InputRef:
    raise AssertionError(uri)
