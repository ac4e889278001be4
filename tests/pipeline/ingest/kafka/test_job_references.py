"""Jobs by reference: a record names a file, which becomes one job, if its tenant may name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from schemas.jobs.job import Tier
from tests.pipeline.ingest.kafka.kafka_harness import KafkaHarness, ProducedRecord, request, until
from tests.servers.kafka import KafkaBroker


@pytest.fixture
def harness(kafka_broker: KafkaBroker, unique_name: Callable[[], str], tmp_path: Path) -> Iterator[KafkaHarness]:
    harness = KafkaHarness(kafka_broker.bootstrap, unique_name(), tmp_path / "root")
    harness.make_topics(harness.requests, harness.deadletter, f"{harness.name}.jobs")
    yield harness
    harness.close()


@pytest.mark.slow
def test_given_jobs_by_reference_when_they_come_and_come_again_then_each_is_one_job_or_a_dead_letter(
    harness: KafkaHarness, tmp_path: Path
) -> None:
    topic, inputs = f"{harness.name}.jobs", tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "one.jsonl").write_bytes(request("a") + b"\n" + request("b") + b"\n")
    uri = f"file://{inputs}/"
    good = {"uri": f"{uri}one.jsonl", "options": {"tier": "bulk", "metadata": {"who": "me"}}}
    bad = [
        {"uri": "file:///etc/passwd"},
        {"uri": f"{uri}missing.jsonl"},
        {"uri": f"{uri}one.jsonl", "options": {"tenant": "other"}},
        {"uri": f"{uri}one.jsonl", "options": {"model": "gpt-x"}},
        {"url": "one"},
    ]
    headers = [("job", b"nightly"), ("tier", b"standard")]
    harness.produce(
        [ProducedRecord(orjson.dumps(good), headers=headers), *(ProducedRecord(orjson.dumps(one)) for one in bad)],
        topic,
    )

    for group in ("one", "two"):
        named = harness.settings(
            requests={}, jobs={topic: "team"}, uri_prefixes={"team": (uri,)}, group_id=group + harness.name
        )
        with harness.running(harness.ingest(named)):
            until(
                lambda name=named.group_id: harness.committed(0, group=name, topic=topic) == 6, "all offsets committed"
            )
        (inputs / "one.jsonl").write_bytes(
            request("later") + b"\n"
        )  # the job reads what it was accepted with, or fails

    (job,) = harness.jobs()
    assert (job.tenant, job.tier, job.metadata) == ("team", Tier.BULK, {"who": "me", "job": "nightly"})
    dead_letters = sorted(one.reason_code for one in harness.dead_letters())
    assert dead_letters == ["forbidden_uri", "input_error", "invalid_request", "invalid_request", "model_not_found"]
    assert len(harness.consume(harness.deadletter, 10)) == 10, "each read sent their messages"
