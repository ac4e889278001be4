"""A whole installation on one machine: real servers (S3 with SQS, Kafka, Redis), and tokenmill's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.ledger.ledger import JOBS, JobLedger
from schemas.jobs.outcome import Manifest
from tests.servers.faulty_http import FaultyHttp
from tests.servers.kafka import BucketStorage, KafkaBroker
from tests.servers.moto import MotoServer
from tests.servers.process import ServerProcess
from tests.servers.redis import RedisServer
from tests.servers.s3 import S3Server
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
BUCKET = "tokenmill"
TOPICS = ("requests", "jobs", "results", "events", "deadletter")
NULL_WORKER = ("-m", "tests.cluster.null_worker")


@dataclass
class Cluster:
    """The servers, and the processes that were started.

    Attributes:
        variables: settings of all processes.  engine: options of workers.
        wire: the fault proxy between the processes and S3 (SQS too), if there is one.
    """

    folder: Path
    s3: S3Server
    kafka: KafkaBroker
    redis: RedisServer
    queue_url: str
    variables: dict[str, str]
    engine: tuple[str, ...]
    wire: FaultyHttp | None = None
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def root(self) -> str:
        return f"s3://{BUCKET}"

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start (again) the process of this name; the part before its "-" is the command, or "null" for a null
        worker, which gets the options of workers too."""
        command = name.partition("-")[0]
        program = NULL_WORKER if command == "null" else ("-m", "tokenmill", command)
        options = self.engine if command in ("worker", "null") else ()
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *program, *options],
                stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **self.variables},
            )  # fmt: skip
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        """The process's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def store(self) -> S3Store:
        """The root, for inspection."""
        return S3Store.from_url(self.root, settings_of(self.s3), read_only=True)

    def ledger(self, job: str) -> JobLedger:
        return JobLedger(self.store(), f"{JOBS}{job}/")

    def jobs(self) -> list[str]:
        """Ids of all jobs."""
        return [prefix.removeprefix(JOBS).rstrip("/") for prefix in self.store().folders(JOBS)]

    def outcomes(self) -> dict[str, Manifest]:
        """Manifests of the jobs that have ended."""
        found = {job: self.ledger(job).manifest() for job in self.jobs()}
        return {job: manifest for job, manifest in found.items() if manifest is not None}

    def stop(self) -> dict[str, int]:
        """Stop all processes; returns their exit codes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        return codes


@contextmanager
def running_cluster(
    folder: Path,
    engine: Sequence[str],
    processes: Sequence[str],
    s3_kind: type[S3Server] = MotoServer,
    faulty: int | None = None,
    **variables: str,
) -> Iterator[Cluster]:
    """Servers and processes until the block ends.

    Args:
        processes: such as "worker-1", "null-1", "intake-1".
        s3_kind: one without SQS sends no notifications: ingest finds files by listing.
        faulty: the seed of the fault proxy between processes and S3; the broker's log is then in a bucket, so that
            it can be killed. None: neither.
    """
    with ExitStack() as stack:

        def server(kind: Callable[[Path], ServerProcess], name: str) -> Any:
            (folder / name).mkdir(parents=True, exist_ok=True)
            made = kind(folder / name)
            made.start()
            stack.callback(made.close)
            return made

        s3, redis = server(s3_kind, "s3"), server(RedisServer, "redis")
        wire = storage = None
        if faulty is not None:
            wire = stack.enter_context(FaultyHttp(s3.endpoint, faulty, remember=False))
            storage = _log_storage(server(MotoServer, "kafka-s3"))  # a server of its own, which the faults don't affect
        kafka = server(lambda folder: KafkaBroker(folder, storage), "kafka")
        s3.ensure_bucket(BUCKET)
        cluster = Cluster(
            folder, s3, kafka, redis, _queue_of_drops(s3) if isinstance(s3, MotoServer) else "",
            wire=wire,
            variables={
                "PYTHONPATH": str(ROOT),
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "testtest",
                "AWS_DEFAULT_REGION": "us-east-1",
                "TOKENMILL_ROOT": f"s3://{BUCKET}",
                "TOKENMILL_S3__ENDPOINT": s3.endpoint if wire is None else wire.endpoint,
                "TOKENMILL_REDIS_URL": redis.url,
                "TOKENMILL_KAFKA__BOOTSTRAP_SERVERS": f'["{kafka.bootstrap}"]',
                "TOKENMILL_KAFKA__URI_PREFIXES": f'{{"default": ["s3://{BUCKET}/"]}}',
                "TOKENMILL_CELERY__QUEUES": '{"tokenmill": "default"}',
                "TOKENMILL_CELERY__URI_PREFIXES": f'{{"default": ["s3://{BUCKET}/"]}}',
                "TOKENMILL_KAFKA__SESSION_TIMEOUT_SECONDS": "6",
                "TOKENMILL_KAFKA__IDEMPOTENCE": "false",
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            engine=tuple(engine),
        )  # fmt: skip
        if cluster.queue_url:
            cluster.variables["TOKENMILL_BUCKET__QUEUE_URL"] = cluster.queue_url
        _make_topics(kafka)
        try:
            for name in processes:
                cluster.start(name)
            yield cluster
        finally:
            for process in cluster.processes.values():
                process.kill()
                process.wait()


def settings_of(s3: S3Server) -> S3Settings:
    """How tests reach the server."""
    return S3Settings(endpoint=s3.endpoint, region="us-east-1", access_key="test", secret_key="testtest")


def _log_storage(s3: MotoServer) -> BucketStorage:
    """The bucket of a broker's log, so that it may be killed."""
    s3.ensure_bucket("kafka")
    return BucketStorage(s3.endpoint, "kafka", s3.access_key, s3.secret_key, s3.region)


def _queue_of_drops(s3: MotoServer) -> str:
    """A queue that gets the bucket's notifications of new objects."""
    bucket, queues = s3.client(), s3.client("sqs")
    url: str = queues.create_queue(QueueName="drops")["QueueUrl"]
    arn = queues.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    rule = {"Key": {"FilterRules": [{"Name": "prefix", "Value": "incoming/"}]}}
    bucket.put_bucket_notification_configuration(
        Bucket=BUCKET,
        NotificationConfiguration={
            "QueueConfigurations": [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"], "Filter": rule}]
        },
    )
    return url


def _make_topics(kafka: KafkaBroker) -> None:
    from kafka.admin import KafkaAdminClient, NewTopic

    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_topics([NewTopic(f"tokenmill.{name}", 2, 1) for name in TOPICS])
    admin.close()
