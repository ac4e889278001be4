"""Spans and their parents, by OpenTelemetry's SDK; without tracing nothing is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.ports import World
from pipeline.tracing import (
    NO_SPAN,
    NO_TRACES,
    current_traceparent,
    ingest_span,
    log_fields,
    parse_traceparent,
    read_traceparent,
    working_for,
)
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Job
from schemas.models import ModelPin
from tests.servers.otlp import tracing

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SENT[:-2] + "00"
OTHER = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
INPUT = InputRef(uri="/in", format=InputFormat.JSONL, files=(InputFile(uri="/in", size=1, sha256="0" * 64),))
PIN = ModelPin(name="m", source="/m", digest="sha256:1", dtype="float32")


class TracingHarness:
    """The adapter, with the SDK's own exporter to memory."""

    def __init__(self) -> None:
        export = tracing("opentelemetry.sdk.trace.export")
        self.exporter = tracing("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
        adapter = tracing("pipeline.observability.otel")
        self.traces: Any = adapter.OtelTraces("tokenmill-test", "1", export.SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> dict[str, Any]:
        """By name; each comes once."""
        found = self.exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


@pytest.fixture
def traced() -> Iterator[TracingHarness]:
    made = TracingHarness()
    yield made
    made.traces.close()


def job(**given: Any) -> Job:
    return Job(id="job-1", input=INPUT, models=(PIN,), created_at=datetime(2026, 1, 1, tzinfo=UTC), **given)


def written(span: Any) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{int(span.context.trace_flags):02x}"


@pytest.mark.parametrize(
    "sent",
    [
        None, "", "junk", SENT.upper(), SENT + " ", SENT[:-1], "ff" + SENT[2:], f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", b"\xff\xfe", SENT.replace("-", "_"),
    ],
)  # fmt: skip
def test_given_an_invalid_traceparent_then_it_is_ignored(sent: str | bytes | None) -> None:
    assert read_traceparent(sent) is None


def test_given_a_traceparent_as_text_or_bytes_then_it_is_read_as_it_is() -> None:
    assert read_traceparent(SENT) == read_traceparent(SENT.encode()) == SENT
    assert str(parse_traceparent(SENT)) == SENT


def test_given_no_tracing_then_there_is_one_shared_span_and_none_is_current() -> None:
    span = NO_TRACES.begin("x", {"a": 1}, parent=SENT)
    assert span is NO_SPAN
    with working_for(span), ingest_span(NO_TRACES, "kafka batch", (SENT,)) as inner:
        assert inner is NO_SPAN
        assert current_traceparent() is None
        assert structlog.contextvars.get_contextvars() == {}
    assert (NO_TRACES.of_job(job()), log_fields(span.traceparent)) == (None, {})


def test_given_a_span_then_its_children_and_log_lines_belong_to_it(traced: TracingHarness) -> None:
    outer = traced.traces.begin("outer", {"kept": 1, "left out": None}, kind="server", parent=SENT)
    with working_for(outer):
        assert current_traceparent() == outer.traceparent
        assert structlog.contextvars.get_contextvars() == log_fields(outer.traceparent)
        traced.traces.begin("inner").end()
    outer.end(name="renamed")
    outer.end("again")
    assert current_traceparent() is None
    assert structlog.contextvars.get_contextvars() == {}
    spans = traced.spans
    assert written(spans["renamed"]).split("-")[1] == SENT.split("-")[1]
    assert spans["inner"].parent.span_id == spans["renamed"].context.span_id
    assert f"{spans['renamed'].parent.span_id:016x}" == SENT.split("-")[2]
    assert dict(spans["renamed"].attributes) == {"kept": 1}
    assert spans["renamed"].status.is_ok


def test_given_a_failure_then_the_span_has_the_errors_name_and_not_its_message(traced: TracingHarness) -> None:
    with pytest.raises(KeyError), ingest_span(traced.traces, "kafka batch", ()):
        raise KeyError("a prompt, perhaps")
    (span,) = traced.spans.values()
    assert (span.status.is_ok, span.status.description, span.events) == (False, "KeyError", ())


@pytest.mark.parametrize(
    ("sent", "parent", "links"),
    [((), False, 0), ((None,), False, 0), ((SENT,), True, 0), ((SENT, None, SENT), True, 2), ((SENT, OTHER), False, 2)],
)
def test_given_messages_of_one_trace_or_of_many_then_their_span_belongs_to_it_or_is_linked(
    traced: TracingHarness, sent: tuple[str | None, ...], parent: bool, links: int
) -> None:
    with ingest_span(traced.traces, "kafka batch", sent):
        pass
    span = traced.spans["kafka batch"]
    assert (span.parent is not None, len(span.links)) == (parent, links)
    assert (f"{span.context.trace_id:032x}" in SENT) is parent


def test_given_a_job_traced_at_ingest_then_each_dispatcher_ends_the_same_span(traced: TracingHarness) -> None:
    made, other = job(traceparent=SENT), TracingHarness()
    assert traced.traces.of_job(made) == other.traces.of_job(made)
    shard = traced.traces.begin("shard", parent=traced.traces.of_job(made))
    shard.end()
    ended = made.created_at + timedelta(seconds=90)
    other.traces.job_ended(made, ended, {"tokenmill.rows": 3}, "failed")
    span = other.spans["job"]
    assert written(span) == traced.traces.of_job(made)
    assert traced.spans["shard"].parent.span_id == span.context.span_id
    assert f"{span.parent.span_id:016x}" == SENT.split("-")[2]
    assert (span.end_time - span.start_time, span.status.description) == (90 * 10**9, "failed")


def test_given_a_job_not_traced_at_ingest_then_its_trace_follows_from_its_id(traced: TracingHarness) -> None:
    made = job()
    traced.traces.job_ended(made, made.created_at, {})
    span = traced.spans["job"]
    assert span.parent is None
    assert traced.traces.of_job(made) == TracingHarness().traces.of_job(made)
    context = parse_traceparent(traced.traces.of_job(made) or "")
    assert context is not None
    assert (context.trace, context.span, context.flags & 1) == (span.context.trace_id, span.context.span_id, 1)
    assert traced.traces.of_job(job().model_copy(update={"id": "job-2"})) != traced.traces.of_job(made)


def test_given_a_sender_whose_trace_is_not_recorded_then_no_span_is(traced: TracingHarness) -> None:
    span = traced.traces.begin("x", parent=UNSAMPLED)
    assert span.traceparent is not None
    assert span.traceparent.endswith("-00"), "that is passed on"
    span.end()
    traced.traces.job_ended(job(traceparent=UNSAMPLED), datetime.now(UTC), {})
    assert traced.spans == {}


def test_given_a_sampler_from_the_environment_then_jobs_follow_it_in_all_processes_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    one, two = TracingHarness(), TracingHarness()
    jobs = [job().model_copy(update={"id": f"job-{number}"}) for number in range(200)]
    traceparents = [one.traces.of_job(each) for each in jobs]
    assert traceparents == [two.traces.of_job(each) for each in jobs]
    recorded = [traceparent for traceparent in traceparents if traceparent is not None and traceparent.endswith("-01")]
    assert 60 < len(recorded) < 140
    for each in jobs:
        one.traces.job_ended(each, each.created_at, {})
    assert len(one.exporter.get_finished_spans()) == len(recorded)


@pytest.mark.slow
def test_given_ingest_with_tracing_then_the_job_has_its_traceparent_and_the_same_order_finds_it(
    traced: TracingHarness, tmp_path: Path
) -> None:
    with FolderStore(tmp_path) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch, traced.traces)
        ledger = JobLedger(store, f"{JOBS}j/")
        with ingest_span(world.traces, "kafka batch", (SENT,)) as span:
            first = submit(JobOrder(INPUT, (PIN,)), ledger, world, job_id="j")
        assert first.job.traceparent == span.traceparent
        with ingest_span(world.traces, "another", (OTHER,)):
            again = submit(JobOrder(INPUT, (PIN,)), ledger, world, job_id="j")
        assert (again.created, again.job.traceparent) == (False, span.traceparent)
        plain = dataclasses.replace(world, traces=NO_TRACES)
        other = JobLedger(store, f"{JOBS}k/")
        submit(JobOrder(INPUT, (PIN,)), other, plain, job_id="k")
        assert b"traceparent" not in store.read(f"{JOBS}k/job.json"), "without tracing the record is as before"
