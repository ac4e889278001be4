"""File ingest from a bucket on real servers' protocols: S3, its events through SQS, and the sweep without events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.sqs import SqsQueue, SqsSettings
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.ingest.dead_letters import DeadLetters
from pipeline.ingest.files.s3_events import BucketEvents, EventSettings
from pipeline.ingest.files.s3_inbox import BucketInbox
from pipeline.ingest.files.source import FileIngestSettings, FileIngestSource, IngestResult
from pipeline.ingest.files.watcher import FileIngestWatcher, WatchSettings
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.ports import PipelineError, World
from tests.pipeline.contracts.ingest_contract import LINE, FileIngestContract, InboxHarness, RefusalContract
from tests.servers.moto import MotoServer
from tests.waiting import HANG_SECONDS

SOON = EventSettings(no_room=0, waiting=0, failed=0, foreign=0)
PREFIX = "team/incoming/"


@dataclass(frozen=True)
class Clients:
    """Clients of the server: they take their time to be made."""

    server: MotoServer
    s3: Any
    sqs: Any
    connection: S3Connection


@pytest.fixture(scope="module")
def clients(s3_server: MotoServer) -> Clients:
    settings = S3Settings(
        endpoint=s3_server.endpoint,
        region=s3_server.region,
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
        retry_timeout_seconds=5.0,
    )
    return Clients(s3_server, s3_server.client(), s3_server.client("sqs"), S3Connection(settings))


class BucketInboxHarness(InboxHarness):
    """A bucket with a tenant's inbox, and by default with the root."""

    def __init__(self, clients: Clients, bucket: str, root: Path | None = None) -> None:
        self.clients = clients
        self.bucket = bucket
        self.s3 = clients.s3
        self.sqs = clients.sqs
        self.connection = clients.connection
        self.s3.create_bucket(Bucket=bucket)
        self.tenant = "team-a"
        self.store = S3Store(bucket, "root", self.connection) if root is None else FolderStore(root)
        self.world = World(self.store, SystemClock(), SystemRandomness(), self.store.scratch)

    def put(self, name: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        self.s3.put_object(Bucket=self.bucket, Key=PREFIX + name, Body=data, Metadata=dict(metadata or {}))

    def source(self, intake: Intake, world: World) -> FileIngestSource:
        return FileIngestSource(self.inbox(), intake, world, FileIngestSettings(sidecar_wait_seconds=60.0))

    def inbox(self) -> BucketInbox:
        return BucketInbox(self.connection, self.bucket, PREFIX, self.tenant)

    def notice(self, source: FileIngestSource) -> None:
        source.sweep()

    def remove(self, name: str) -> None:
        self.s3.delete_object(Bucket=self.bucket, Key=PREFIX + name)

    def has_file(self, name: str) -> bool:
        return self.inbox().find(name) is not None


class NotifiedInboxHarness(BucketInboxHarness):
    """The same, and the bucket sends an event of each upload to a queue."""

    def __init__(self, clients: Clients, bucket: str, root: Path | None = None) -> None:
        super().__init__(clients, bucket, root)
        self._queues: dict[int, SqsQueue] = {}
        self.queue_url = self.sqs.create_queue(QueueName=bucket)["QueueUrl"]
        arn = self.sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=["QueueArn"])["Attributes"][
            "QueueArn"
        ]
        below = {"Key": {"FilterRules": [{"Name": "prefix", "Value": PREFIX}]}}
        wanted = {"QueueConfigurations": [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"], "Filter": below}]}
        self.s3.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration=wanted)

    def queue(self, visibility: int = 30) -> SqsQueue:
        if visibility not in self._queues:
            self._queues[visibility] = SqsQueue(
                SqsSettings(
                    self.queue_url,
                    region=self.clients.server.region,
                    endpoint=self.clients.server.endpoint,
                    access_key=self.clients.server.access_key,
                    secret_key=self.clients.server.secret_key,
                    wait_seconds=0,
                    visibility_seconds=visibility,
                )
            )
        return self._queues[visibility]

    def events(self, source: FileIngestSource, visibility: int = 30, settings: EventSettings = SOON) -> BucketEvents:
        inbox = source.inbox
        assert isinstance(inbox, BucketInbox)
        return BucketEvents(self.queue(visibility), [(inbox, source)], self.world, settings)

    def left(self) -> int:
        """Messages on the queue, whether received or not."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    def send_event(self, key: str, bucket: str | None = None, **more: str) -> None:
        """An event, perhaps once more, late and out of order."""
        described = {"bucket": {"name": bucket or self.bucket}, "object": {"key": key} | more}
        self.send_document(Records=[{"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "s3": described}])

    def send_document(self, **document: Any) -> None:
        self.sqs.send_message(QueueUrl=self.queue_url, MessageBody=json.dumps(document))


class EventsInboxHarness(NotifiedInboxHarness):
    """Each event comes twice, and files are found only by their events."""

    def put(self, name: str, data: bytes, metadata: Mapping[str, str] | None = None) -> None:
        super().put(name, data, metadata)
        self.send_event(PREFIX + name)

    def take_all(self, settings: IntakeSettings | None = None) -> list[Any]:
        for name in [entry.name for entry in self.inbox().entries()]:
            self.send_event(PREFIX + name)
        return super().take_all(settings)

    def notice(self, source: FileIngestSource) -> None:
        events = self.events(source)
        for _ in range(8):
            if not events.poll() or not self.left():
                break


@pytest.fixture
def bucket(unique_name: Callable[[], str]) -> str:
    return f"drops-{unique_name()[-8:]}"


class TestBucketSweepContract(FileIngestContract, RefusalContract):
    every = 3

    @pytest.fixture
    def harness(self, clients: Clients, bucket: str, tmp_path: Path) -> BucketInboxHarness:
        return BucketInboxHarness(clients, bucket, tmp_path / "root")


class TestBucketEventsContract(FileIngestContract):
    every = 5

    @pytest.fixture
    def harness(self, clients: Clients, bucket: str, tmp_path: Path) -> BucketInboxHarness:
        return EventsInboxHarness(clients, bucket, tmp_path / "root")


@pytest.fixture
def harness(clients: Clients, bucket: str) -> NotifiedInboxHarness:
    made = NotifiedInboxHarness(clients, bucket)
    assert made.left() == 1, "S3 tries the queue with a test event"
    drain(made, made.events(made.intake()))
    made.serve()
    return made


def drain(harness: NotifiedInboxHarness, events: BucketEvents) -> None:
    """Handle messages until none is left."""
    for _ in range(50):
        if not harness.left():
            return
        events.poll()
    raise AssertionError(f"{harness.left()} messages stay on the queue")


@pytest.mark.slow
def test_given_uploads_at_once_and_in_parts_when_events_come_then_each_is_one_job_and_the_queue_is_empty(
    harness: NotifiedInboxHarness,
) -> None:
    harness.put("bulk/with space+é.jsonl", LINE)
    upload = harness.s3.create_multipart_upload(Bucket=harness.bucket, Key=PREFIX + "parts.jsonl")["UploadId"]
    part = {"Bucket": harness.bucket, "Key": PREFIX + "parts.jsonl", "UploadId": upload}
    tag = harness.s3.upload_part(**part, PartNumber=1, Body=LINE * 2)["ETag"]
    source = harness.intake()
    events = harness.events(source)
    drain(harness, events)
    assert len(harness.jobs()) == 1, "what is half uploaded can't be seen"
    harness.s3.complete_multipart_upload(**part, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": tag}]})
    assert harness.left() >= 1, "this server sends two events of an upload in parts"
    drain(harness, events)
    assert sorted(job.input.size for job in harness.jobs()) == [len(LINE), 2 * len(LINE)]
    assert {job.tenant for job in harness.jobs()} == {"team-a"}
    assert harness.dead_letters() == []


@pytest.mark.slow
def test_given_events_that_get_lost_when_the_watch_sweeps_then_nothing_is(harness: NotifiedInboxHarness) -> None:
    harness.put("a.jsonl", LINE)
    harness.sqs.purge_queue(QueueUrl=harness.queue_url)
    source = harness.intake()
    watch = FileIngestWatcher(
        [source], harness.world, WatchSettings(sweep_interval_seconds=0.0, retry_seconds=0.0), harness.events(source)
    )
    watch.step()
    assert len(harness.jobs()) == 1


@pytest.mark.slow
def test_given_a_watch_that_runs_when_files_are_dropped_then_they_are_jobs_at_once_and_it_can_be_stopped(
    harness: NotifiedInboxHarness,
) -> None:
    source = harness.intake()
    watch = FileIngestWatcher(
        [source],
        harness.world,
        WatchSettings(sweep_interval_seconds=3600.0, retry_seconds=0.05),
        harness.events(source),
    )
    stop = threading.Event()
    thread = threading.Thread(target=watch.run, args=(stop,))
    thread.start()
    try:
        for number in range(3):
            harness.put(f"{number}.jsonl", LINE)
        until = time.monotonic() + HANG_SECONDS
        while len(harness.jobs()) < 3 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    assert len(harness.jobs()) == 3


def test_given_events_of_other_inboxes_when_they_come_then_they_are_ignored_left_or_a_dead_letter(
    harness: NotifiedInboxHarness,
) -> None:
    source = harness.intake()
    events = harness.events(source)
    harness.s3.put_object(Bucket=harness.bucket, Key="elsewhere/a.jsonl", Body=LINE)
    harness.send_event("elsewhere/a.jsonl")
    harness.send_document(Service="Amazon S3", Event="s3:TestEvent", Bucket=harness.bucket)
    harness.sqs.send_message(QueueUrl=harness.queue_url, MessageBody="this is not an event")
    drain(harness, events)
    ((code, location),) = harness.dead_letters()
    assert (code, location) == ("invalid_event", harness.queue_url)
    (found,) = DeadLetters(harness.world).dead_letters()
    assert DeadLetters(harness.world).original(found.dead_letter) == b"this is not an event"

    harness.send_event(PREFIX + "a.jsonl", bucket="another-bucket")
    events.poll()
    assert harness.left() == 1, "it may be for another consumer"
    assert harness.jobs() == []
    assert len(harness.dead_letters()) == 1


@pytest.mark.slow
def test_given_a_refused_message_when_it_is_replayed_then_it_is_on_the_queue_again(
    harness: NotifiedInboxHarness,
) -> None:
    events = harness.events(harness.intake())
    harness.sqs.send_message(QueueUrl=harness.queue_url, MessageBody="poison")
    drain(harness, events)
    dead_letters = DeadLetters(harness.world)
    (found,) = dead_letters.dead_letters()
    dead_letters.replay(found.dead_letter.id, lambda _, original: events.replay(original))
    assert harness.left() == 1
    drain(harness, events)
    assert len(harness.dead_letters()) == 2, "refused again: a message of its own"


@pytest.mark.slow
def test_given_a_tenant_without_room_when_events_come_then_the_queue_is_not_polled(
    harness: NotifiedInboxHarness,
) -> None:
    settings = IntakeSettings(max_tenant_tokens=1, refresh_interval_seconds=0.0)
    source = harness.intake(settings)
    events = harness.events(source)
    harness.put("a.jsonl", LINE)
    drain(harness, events)
    harness.put("b.jsonl", LINE)
    for _ in range(5):
        assert events.poll() is None
    (job,) = harness.jobs()
    harness.end(job)
    (message,) = harness.queue().receive()
    assert message.receives == 1, "each receive in vain brings a message nearer to the queue's own dead-letter queue"
    harness.queue().postpone(message, 0)
    drain(harness, events)
    assert len(harness.jobs()) == 2


@pytest.mark.slow
def test_given_work_that_takes_longer_than_messages_stay_hidden_when_others_look_then_they_see_none(
    harness: NotifiedInboxHarness,
) -> None:
    seen = list[str]()

    class SlowIntake(Intake):
        def accept(self, draft: Any) -> Any:
            time.sleep(2.5)
            seen.extend(message.id for message in harness.queue().receive())
            return super().accept(draft)

    harness.put("a.jsonl", LINE)
    source = harness.source(SlowIntake(harness.world), harness.world)
    assert harness.events(source, visibility=1).poll() == 1
    assert seen == []
    assert harness.left() == 0
    assert len(harness.jobs()) == 1


@pytest.mark.slow
def test_given_an_intake_that_dies_before_it_deletes_the_message_when_another_comes_then_it_is_one_job(
    harness: NotifiedInboxHarness,
) -> None:
    harness.put("a.jsonl", LINE)
    assert len(harness.queue(visibility=1).receive()) == 1
    assert harness.intake().take("a.jsonl") is IngestResult.JOB
    time.sleep(1.1)
    events = harness.events(harness.intake())
    assert events.poll() == 1
    assert harness.left() == 0
    assert len(harness.jobs()) == 1


@pytest.fixture
def versioned(harness: NotifiedInboxHarness) -> NotifiedInboxHarness:
    harness.s3.put_bucket_versioning(Bucket=harness.bucket, VersioningConfiguration={"Status": "Enabled"})
    return harness


@pytest.mark.slow
def test_given_a_versioned_bucket_when_a_file_is_replaced_before_its_event_comes_then_both_versions_are_jobs(
    versioned: NotifiedInboxHarness,
) -> None:
    for _ in range(2):
        versioned.put("a.jsonl", LINE)
    listed = versioned.s3.list_object_versions(Bucket=versioned.bucket, Prefix=PREFIX)["Versions"]
    for version in listed:
        versioned.send_event(PREFIX + "a.jsonl", versionId=version["VersionId"])  # as S3 does, and this server doesn't
    drain(versioned, versioned.events(versioned.intake()))
    jobs = versioned.jobs()
    assert len(jobs) == 2, "the same bytes at the same second, but put twice"
    assert {job.input.files[0].version for job in jobs} == {version["VersionId"] for version in listed}
    assert len(versioned.take_all()) == 2


def test_given_a_versioned_bucket_when_a_file_is_deleted_before_its_event_comes_then_it_is_no_job(
    versioned: NotifiedInboxHarness,
) -> None:
    versioned.put("a.jsonl", LINE)
    versioned.s3.delete_object(Bucket=versioned.bucket, Key=PREFIX + "a.jsonl")
    drain(versioned, versioned.events(versioned.intake()))
    assert versioned.jobs() == []
    assert versioned.inbox().find("a.jsonl", "no-such-version") is None


@pytest.mark.slow
def test_given_options_in_metadata_when_the_event_comes_then_the_job_has_them_and_the_tenant_is_the_inboxs(
    harness: NotifiedInboxHarness,
) -> None:
    harness.put("a.jsonl", LINE, {"tokenmill-tier": "bulk", "seed": "5", "tenant": "somebody-else"})
    harness.put("b.jsonl", LINE, {"tokenmill-tenant": "somebody-else"})
    drain(harness, harness.events(harness.intake()))
    (job,) = harness.jobs()
    assert (job.tier, job.settings.seed, job.tenant) == ("bulk", 5, "team-a")
    assert [code for code, _ in harness.dead_letters()] == ["unknown_option"]


@pytest.mark.slow
def test_given_an_announced_sidecar_when_it_comes_later_then_the_file_waits_for_it(
    harness: NotifiedInboxHarness,
) -> None:
    source = harness.intake()
    events = harness.events(source)
    harness.put("a.jsonl", LINE, {"tokenmill-sidecar": "true"})
    assert events.poll() == 1
    assert source.sweep() == {IngestResult.WAITING: 1}
    assert harness.left() == 1
    harness.put("a.job.json", b'{"tier": "bulk"}')
    drain(harness, events)
    (job,) = harness.jobs()
    assert job.tier == "bulk"


@pytest.mark.slow
def test_given_an_announced_sidecar_that_never_comes_when_the_wait_is_over_then_it_is_a_dead_letter(
    harness: NotifiedInboxHarness,
) -> None:
    harness.put("a.jsonl", LINE, {"tokenmill-sidecar": "true"})
    impatient = FileIngestSource(
        harness.inbox(), Intake(harness.world), harness.world, FileIngestSettings(sidecar_wait_seconds=-1.0)
    )
    drain(harness, harness.events(impatient))
    assert [code for code, _ in harness.dead_letters()] == ["sidecar_missing"]
    harness.put("a.job.json", b'{"tier": "bulk"}')
    assert harness.intake().sweep() == {}
    (found,) = DeadLetters(harness.world).dead_letters()
    DeadLetters(harness.world).replay(found.dead_letter.id)
    (job,) = harness.take_all()
    assert job.tier == "bulk"


@pytest.mark.slow
def test_given_two_inboxes_in_one_bucket_when_files_come_then_the_prefix_determines_the_tenant(
    harness: NotifiedInboxHarness,
) -> None:
    inboxes = [BucketInbox(harness.connection, harness.bucket, prefix, tenant) for prefix, tenant in
               (("incoming/", "all"), ("x/incoming/", "x"))]  # fmt: skip
    sources = [(inbox, FileIngestSource(inbox, Intake(harness.world), harness.world)) for inbox in inboxes]
    for key in ("incoming/a.jsonl", "x/incoming/a.jsonl", "x/a.jsonl"):
        harness.s3.put_object(Bucket=harness.bucket, Key=key, Body=LINE)
        harness.send_event(key)
    drain(harness, BucketEvents(harness.queue(), sources, harness.world, SOON))
    assert sorted(job.tenant for job in harness.jobs()) == ["all", "x"]

    inside = BucketInbox(harness.connection, harness.bucket, "incoming/y/", "y")
    with pytest.raises(PipelineError, match=r"incoming/y/ is inside .*incoming/"):
        FileIngestWatcher(
            [source for _, source in sources] + [FileIngestSource(inside, Intake(harness.world), harness.world)],
            harness.world,
        )
