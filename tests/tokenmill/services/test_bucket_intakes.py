"""Intakes of a bucket as real processes: two at once, with duplicate events, one killed and one stopped for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.ingest.dead_letters import LETTERS
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from schemas.models import CatalogEntry, ModelPin
from tests.servers.moto import MotoServer
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[3])
FILES = 30


@pytest.fixture
def bucket(s3_server: MotoServer, unique_name: Callable[[], str]) -> str:
    """A bucket with event notifications to a queue of the same name."""
    name = s3_server.make_bucket(f"intakes-{unique_name()[-8:]}")
    queues = s3_server.client("sqs")
    url = queues.create_queue(QueueName=name)["QueueUrl"]
    arn = queues.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    below = {"Key": {"FilterRules": [{"Name": "prefix", "Value": "root/incoming/"}]}}
    notifications = {"QueueConfigurations": [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"], "Filter": below}]}
    s3_server.client().put_bucket_notification_configuration(Bucket=name, NotificationConfiguration=notifications)
    return name


@pytest.fixture
def start(s3_server: MotoServer, bucket: str, tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts an intake of the bucket; all are killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    variables = {
        "PYTHONPATH": ROOT,
        "TOKENMILL_ROOT": f"s3://{bucket}/root",
        "TOKENMILL_S3__ENDPOINT": s3_server.endpoint,
        "TOKENMILL_S3__REGION": s3_server.region,
        "TOKENMILL_BUCKET__QUEUE_URL": s3_server.client("sqs").get_queue_url(QueueName=bucket)["QueueUrl"],
        "TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS": "2",
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"intake-{len(processes)}.log").open("wb") as log:
            command = [sys.executable, "-m", "tokenmill", "intake"]
            processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables}, cwd=tmp_path
                )
            )
        return processes[-1]

    yield start
    for number, process in enumerate(processes):
        process.kill()
        process.wait()
        print(f"-- intake {number}\n{(tmp_path / f'intake-{number}.log').read_text()}")


def line(number: int) -> bytes:
    body = {"model": "tiny", "prompt": f"prompt {number}"}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}).encode()


@pytest.mark.exhaustive
def test_given_two_intakes_one_killed_and_one_stopped_when_files_arrive_then_each_is_one_job(
    s3_server: MotoServer, bucket: str, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    settings = S3Settings(
        endpoint=s3_server.endpoint,
        region=s3_server.region,
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
    )
    client, queues = s3_server.client(), s3_server.client("sqs")
    url = queues.get_queue_url(QueueName=bucket)["QueueUrl"]
    with S3Store(bucket, "root", S3Connection(settings)) as store:
        pin = ModelPin(name="tiny", source="/models/tiny", digest="sha256:1", dtype="float32")
        Catalog(store).publish(CatalogEntry(pin=pin, max_model_len=64))

        def jobs() -> list[str]:
            return list(store.folders(JOBS))

        def wait_for(number: int) -> None:
            until = time.monotonic() + HANG_SECONDS
            while len(jobs()) < number:
                assert time.monotonic() < until, f"{len(jobs())} of {number} jobs"
                time.sleep(0.05)

        def drop(numbers: range) -> None:
            for number in numbers:
                key = f"root/incoming/{'bulk/' if number % 2 else ''}{number}.jsonl"
                client.put_object(Bucket=bucket, Key=key, Body=line(number) + b"\n")
                again = {"bucket": {"name": bucket}, "object": {"key": key}}
                record = {"eventSource": "aws:s3", "eventName": "ObjectCreated:Put", "s3": again}
                queues.send_message(QueueUrl=url, MessageBody=json.dumps({"Records": [record]}))

        first, second = start(), start()
        drop(range(10))
        wait_for(3)
        first.kill()
        second.send_signal(signal.SIGSTOP)
        third = start()
        drop(range(10, 20))
        wait_for(13)
        second.send_signal(signal.SIGCONT)
        drop(range(20, FILES))
        wait_for(FILES)
        for process in (second, third):
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        for process in (second, third):
            assert process.wait(HANG_SECONDS) == 0

        found = [JobLedger(store, prefix).job() for prefix in jobs()]
        assert len(found) == FILES
        uris = {job.input.uri for job in found}
        assert len(uris) == FILES
        assert {job.tier.value for job in found} == {"standard", "bulk"}
        assert list(store.list(LETTERS)) == []
