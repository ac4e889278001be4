"""One trace from ingest to the worker's steps, received as OTLP from real processes; and their logs as JSON."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery import Celery
from kafka import KafkaConsumer, KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from tests.cluster.cluster import NULL_WORKER
from tests.pipeline.gateway.webhooks.receiver import Receiver
from tests.servers.kafka import KafkaBroker
from tests.servers.otlp import OtlpReceiver, Received, tracing
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import ROOT, Processes
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.errors import UserError
from tokenmill.processes.tracing import traces_of, wants_traces

SECRET = "a-word-of-a-prompt"
BELONGING = {"worker": "shard committed", "gateway": "request", "intake": "task_taken"}
"""Lines that belong to a span."""
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
SERVER, CLIENT, CONSUMER = 2, 3, 5


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_given_opentelemetrys_variables_then_they_enable_traces(environment: dict[str, str], wanted: bool) -> None:
    assert wants_traces(environment) is wanted


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf"),
    ],
)
def test_given_an_unsupported_value_then_the_variable_and_valid_values_are_named(
    name: str, value: str, right: str
) -> None:
    with pytest.raises(UserError, match=f"{name} .*{value}.*{right}"):
        wants_traces(ENDPOINT | {name: value})


def remote_trace() -> tuple[str, str]:
    """A trace that begins elsewhere: its id, and the header."""
    trace = secrets.token_hex(16)
    return trace, f"00-{trace}-{secrets.token_hex(8)}-01"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    tracing("opentelemetry.exporter.otlp.proto.http")
    made = OtlpReceiver()
    yield made
    made.close()


class Harness:
    """All of an installation on a folder, Redis and Kafka, with traces and JSON logs."""

    def __init__(self, folder: Path, redis: RedisServer, kafka: KafkaBroker, model: Path, otlp: OtlpReceiver) -> None:
        self.folder, self.redis, self.kafka = folder, redis, kafka
        self.hook = Receiver()
        hook = {"url": self.hook.url(), "secret": "whsec_" + "c2VjcmV0" * 4, "events": ["batch.completed"]}
        hooks = {"endpoints": {"default": [hook]}, "allow_private": True, "allow_http": True}
        self.prefix = f"t{secrets.token_hex(4)}"
        self.processes = Processes(
            folder,
            TOKENMILL_ROOT=str(folder / "root"),
            TOKENMILL_REDIS_URL=redis.url,
            TOKENMILL_KAFKA__BOOTSTRAP_SERVERS=f'["{kafka.bootstrap}"]',
            TOKENMILL_KAFKA__TOPIC_PREFIX=self.prefix,
            TOKENMILL_KAFKA__SESSION_TIMEOUT_SECONDS="2",
            TOKENMILL_KAFKA__BATCH_SECONDS="0.3",
            TOKENMILL_KAFKA__IDEMPOTENCE="false",
            TOKENMILL_CELERY__QUEUES=f'{{"{self.prefix}": "default"}}',
            TOKENMILL_GATEWAY__WEBHOOKS=json.dumps(hooks),
            TOKENMILL_TRACING__STEP_SECONDS="0.05",
            TOKENMILL_LOG_FORMAT="json",
            OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="100",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
        )
        (folder / "root").mkdir()
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        names = ("requests", "jobs", "results", "events", "deadletter")
        admin.create_topics([NewTopic(f"{self.prefix}.{name}", 1, 1) for name in names])
        admin.close()
        worker = (*NULL_WORKER, "--model", f"tiny={model}", "--step-ms", 20)
        self.numbers = {
            "worker": self.processes.start(*worker),
            "gateway": self.processes.start("-m", "tokenmill", "gateway", "--port", 0),
            "dispatcher": self.processes.start("-m", "tokenmill", "dispatcher"),
            "intake": self.processes.start("-m", "tokenmill", "intake"),
        }
        self.url = self.processes.url(self.numbers["gateway"])
        wait_for(lambda: httpx2.get(f"{self.url}/v1/models").json()["data"], "no worker is up")

    def post(self, path: str, body: dict[str, Any], traceparent: str) -> Any:
        answer = httpx2.post(f"{self.url}{path}", json=body, headers={"traceparent": traceparent}, timeout=HANG_SECONDS)
        assert answer.status_code == 200, answer.text
        return answer

    def end(self) -> None:
        for process in self.processes.running:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(HANG_SECONDS) for process in self.processes.running] == [0] * len(self.processes.running)

    def close(self) -> None:
        self.processes.close()
        self.hook.kill()


@pytest.fixture
def harness(
    folder: Path, redis_server: RedisServer, kafka_broker: KafkaBroker, model_folder: Path, receiver: OtlpReceiver
) -> Iterator[Harness]:
    made = Harness(folder, redis_server, kafka_broker, model_folder, receiver)
    yield made
    made.close()


def line(name: str) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{SECRET} {name}"}], "max_tokens": 20}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


def of_trace(trace: str) -> Any:
    return lambda span: span.trace == trace


def below(span: Received, above: Received) -> bool:
    return (span.trace, span.parent) == (above.trace, above.span)


@pytest.mark.exhaustive
def test_given_a_trace_at_any_ingest_source_then_it_reaches_the_workers_shard_and_the_published_events(
    harness: Harness, receiver: OtlpReceiver
) -> None:
    # HTTP: a batch, with the webhook of its end.
    trace, parent = remote_trace()
    upload = httpx2.post(f"{harness.url}/v1/files", files={"file": ("in.jsonl", line("a"))}, data={"purpose": "batch"})
    batch = {"input_file_id": upload.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = harness.post("/v1/batches", batch, parent).json()
    first = receiver.wait("POST /v1/batches", of_trace(trace))
    assert (first.service, first.kind, first.parent) == ("tokenmill-gateway", SERVER, parent.split("-")[2])
    shard = check_job(receiver, trace, made["id"], first)
    step = receiver.wait("engine step", lambda span: below(span, shard))
    assert step.attributes["tokenmill.step.rows"] == 1
    assert 0 < step.attributes["tokenmill.step.tokens"] < 200
    hook = receiver.wait("webhook", of_trace(trace))
    assert harness.hook.received[0].headers["traceparent"].split("-")[1:3] == [trace, hook.span]

    # HTTP: an interactive request over the lane.
    trace, parent = remote_trace()
    chat = json.loads(line("b"))["body"]
    answer = harness.post("/v1/chat/completions", chat | {"stream": True}, parent)
    assert answer.text.rstrip().endswith("[DONE]")
    first = receiver.wait("POST /v1/chat/completions", of_trace(trace))
    check_lane(receiver, first)

    # Kafka: records of one trace, and the messages about them.
    trace, parent = remote_trace()
    producer = KafkaProducer(bootstrap_servers=harness.kafka.bootstrap, enable_idempotence=False)
    producer.send(f"{harness.prefix}.requests", line("c"), headers=[("traceparent", parent.encode())]).get(HANG_SECONDS)
    first = receiver.wait("kafka batch", of_trace(trace))
    assert (first.kind, first.parent) == (CONSUMER, parent.split("-")[2])
    assert first.attributes["messaging.batch.message_count"] == 1
    check_job(receiver, trace, first.attributes["tokenmill.job.id"], first)
    results = KafkaConsumer(
        f"{harness.prefix}.results", bootstrap_servers=harness.kafka.bootstrap, auto_offset_reset="earliest",
        group_id=None, consumer_timeout_ms=30_000,
    )  # fmt: skip
    assert dict(next(results).headers)["traceparent"].decode().split("-")[1:3] == [trace, first.span]
    results.close()
    # Of two traces: linked with both.
    for name, (_, one) in (("d", first := remote_trace()), ("e", second := remote_trace())):
        producer.send(f"{harness.prefix}.requests", line(name), headers=[("traceparent", one.encode())])
    producer.flush(30)
    linked = receiver.wait("kafka batch", lambda span: len(span.links) == 2 or span.trace in (first[0], second[0]))
    if linked.links:  # else the two came in two batches
        assert {trace for trace, _ in linked.links} == {first[0], second[0]}
    producer.close()

    # Celery: a job, and an answer.
    caller = Celery("a-caller", broker=harness.redis.url, backend=harness.redis.url, set_as_current=False)
    trace, parent = remote_trace()
    how = {"queue": harness.prefix, "headers": {"traceparent": parent}}
    job = caller.send_task("tokenmill.submit", args=[[json.loads(line("f"))]], **how).get(timeout=HANG_SECONDS)
    first = receiver.wait("tokenmill.submit", of_trace(trace))
    check_job(receiver, trace, job, first)
    trace, parent = remote_trace()
    how["headers"] = {"traceparent": parent}
    body = json.loads(line("g"))["body"]
    answer = caller.send_task("tokenmill.generate", args=[body], **how).get(timeout=HANG_SECONDS)
    assert "choices" in answer
    check_lane(receiver, receiver.wait("tokenmill.generate", of_trace(trace)))
    caller.close()

    harness.end()
    check_nothing_secret_is_exported(harness, receiver)
    check_logs(harness)


def check_job(receiver: OtlpReceiver, trace: str, job_id: str, first: Received) -> Received:
    """The trace from ingest to the shard, which is returned."""
    job = receiver.wait("job", of_trace(trace))
    assert below(job, first)
    assert job.service == "tokenmill-dispatcher"
    assert job.attributes["tokenmill.job.id"] == job_id
    assert (job.attributes["tokenmill.job.status"], job.attributes["tokenmill.rows"]) == ("completed", 1)
    assert below(receiver.wait("plan", of_trace(trace)), job)
    shard = receiver.wait("shard", of_trace(trace))
    assert below(shard, job)
    assert (shard.service, shard.attributes["tokenmill.job.id"]) == ("tokenmill-worker", job_id)
    assert (shard.attributes["tokenmill.outcome"], shard.attributes["tokenmill.rows"]) == ("committed", 1)
    assert job.began <= shard.began < shard.ended
    return shard


def check_lane(receiver: OtlpReceiver, first: Received) -> None:
    """The trace from the gateway over the lane to the worker."""
    lane = receiver.wait("lane", of_trace(first.trace))
    assert (below(lane, first), lane.kind, lane.error) == (True, CLIENT, None)
    work = receiver.wait("generate", of_trace(first.trace))
    assert (below(work, lane), work.service, work.kind) == (True, "tokenmill-worker", SERVER)
    assert (work.events, work.attributes["tokenmill.tokens.completion"]) == (("first token",), 20)


def check_nothing_secret_is_exported(harness: Harness, receiver: OtlpReceiver) -> None:
    """No word of a prompt, and nothing secret."""
    assert receiver.raw
    for body in receiver.raw:
        assert SECRET.encode() not in body
        assert b"whsec_" not in body
        assert harness.redis.url.encode() not in body


def check_logs(harness: Harness) -> None:
    """Each log line of each process is a document, and those within a span have its ids."""
    for command, number in harness.numbers.items():
        lines = harness.processes.log(number).read_text().splitlines()
        documents = [json.loads(one) for one in lines]
        assert documents
        assert all({"timestamp", "level", "event", "command"} <= one.keys() for one in documents), documents[0]
        assert {one["command"] for one in documents} == {command}
        assert SECRET not in "".join(lines)
        if (event := BELONGING.get(command)) is not None:
            within_span = [one for one in documents if one["event"] == event]
            assert [one for one in within_span if len(one.get("trace_id", "")) == 32], (command, within_span)


@pytest.mark.slow
def test_given_an_unreachable_collector_then_remaining_spans_are_discarded_in_time(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.close()
    for name, value in {"ENDPOINT": receiver.endpoint, "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with traces_of("worker") as traces:
        assert traces.is_enabled
        traces.begin("lost").end()


@pytest.mark.slow
def test_given_no_variable_then_nothing_of_opentelemetrys_sdk_is_imported(tmp_path: Path) -> None:
    program = "import sys, tokenmill.commands.serve, tokenmill.services.gateway\n"
    program += "import pipeline.ingest.intake, pipeline.lane.client\n"
    program += "from tokenmill.processes.tracing import traces_of\n"
    program += "with traces_of('worker') as traces: print(traces.is_enabled, "
    program += "[n for n in sys.modules if 'opentelemetry.sdk' in n])"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=plain | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "False []\n"
