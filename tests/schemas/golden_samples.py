"""A sample of each stored record and message, with as many of its fields set as can be together. The golden files are
made of them and compared with them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.answers.segments import AnswerFile, AnswerFiles
from pipeline.gateway.http.api_keys import ApiKey, Scope
from pipeline.gateway.records import BatchOrder, BatchOutcome, IdempotencyRecord, Reader, StoredFile
from pipeline.ingest.celery.tasks import TaskTicket
from pipeline.ingest.dead_letters import DeadLetter, Replay
from pipeline.ingest.files.source import TakenMarker
from pipeline.ingest.kafka.dead_letters import UnsentDeadLetter
from pipeline.ingest.kafka.micro_batches import KafkaBatch, KafkaGroup, Origin
from pipeline.jobs.pending_webhooks import DueWebhook, WebhookRequest
from pipeline.ledger.ledger import parse_stored
from pipeline.ledger.records import (
    AttemptRecord,
    EndRecord,
    NoteRecord,
    PartSummary,
    PlanningFailure,
    RunRecord,
    Tombstone,
    UnreadableRecord,
)
from pipeline.results.part_files import FOOTER_KEY
from schemas.experiments import (
    ArmWeights,
    ClosedBlock,
    Experiment,
    ExperimentArm,
    ExperimentOutcome,
    MachineCounts,
    SliceCounts,
    SliceReport,
)
from schemas.jobs.arrow_schemas import SHARD_FIELDS, result_schema, shard_schema
from schemas.jobs.cascade_outcome import CascadeOutcome, CascadeStep
from schemas.jobs.checkpoints import CheckpointHead, FinishedRows, LoggedChoice, LoggedLogprobs, decode, encode
from schemas.jobs.events import JobChanged, ProgressMade, ReleaseEnded, ShardCommitted, read_event
from schemas.jobs.inputs import FileStamp, InputFile, InputFormat, InputRef
from schemas.jobs.job import Closing, Job, JobSettings, Tier
from schemas.jobs.outcome import Counts, FileEntry, JobError, JobStatus, Manifest, ModelSpending, Usage, WorkerTime
from schemas.jobs.plan import PlanSegment, RejectsRef, ShardRef
from schemas.jobs.progress import Progress
from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.models import CatalogEntry, ModelPin
from schemas.releases import (
    AnswerSample,
    Bounds,
    CanaryAnswer,
    CanaryFailure,
    CanaryRecord,
    CanaryStage,
    LogprobDrift,
    Release,
    ReleaseComparison,
    ReleaseOutcome,
    RequestSample,
    RequestSamples,
    ShadowHead,
)
from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.limits import RateLimits
from schemas.requests.policy_report import ContentVerdict, PolicyReport
from schemas.settings.autoscaling import PoolMemory, StoredScaling
from schemas.settings.releases import ReleaseRules
from schemas.stored import StoredModel
from schemas.virtual_models import Between, Conditions, LabelCondition, Rule, VirtualModel
from schemas.workers.heartbeat import StoredHeartbeat
from schemas.workers.lane import (
    EndEvent,
    ErrorEvent,
    HandBackEvent,
    LaneRequest,
    Route,
    TokensEvent,
    event_json,
    request_json,
)
from schemas.workers.lane import read_event as read_lane_event
from schemas.workers.lane import read_request as read_lane_request
from schemas.workers.metrics import (
    AdapterMetrics,
    HistogramSample,
    PolicyMetrics,
    SloMetrics,
    SloWeights,
    SpeculationMetrics,
    TierMetrics,
    WorkerMetrics,
)
from schemas.workers.queue import task_arguments

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHA = "ab" * 32
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
WORKED = WorkerTime(seconds=1.5, price_per_hour=2.0)
PIN = ModelPin(
    name="tiny", source="/models/tiny", digest=f"sha256:{SHA}", revision="main", dtype="float32", quantization="int8",
    kv_dtype="int8",
)  # fmt: skip
ENTRY = CatalogEntry(pin=PIN, max_model_len=512, policies="p1", published_at=NOON)
COUNTS = Counts(total=6, succeeded=2, failed=1, expired=1, cancelled=1, pending=1)
DONE = Counts(total=2, succeeded=1, failed=1)
USAGE = Usage(prompt=5, cached=1, completion=7, repeated=2, drafted=3, accepted=1)
INPUT = InputRef(
    uri="/in.jsonl", format=InputFormat.JSONL,
    files=(InputFile(uri="/in.jsonl", size=9, sha256=SHA, stamp=FileStamp(mtime=1, ctime=2, inode=3), version="v",
                     etag="e"),),
)  # fmt: skip
SHARD = ShardRef(
    number=1, key="plans/a/shards/00001.parquet", sha256=SHA, size=9, rows=2, computed_rows=2, model="tiny",
    prompt_tokens=10, expected_tokens=14,
)  # fmt: skip
TIMES = HistogramSample(counts=(0, 1), seconds=0.0015)
ANSWER = CanaryAnswer(prompt=(1, 2), tokens=(3,), logprobs=(-0.5,), runners_up=(-1.5,))
BOUNDS = Bounds(mean=0.5, low=0.25, high=0.75)
DRIFT = LogprobDrift(mean=0.25, most=0.5, tokens=16)

RECORDS: dict[str, StoredModel] = {
    "job": Job(
        id="job-1", tenant="team-a", input=INPUT, models=(PIN,),
        settings=JobSettings(seed=7, limit=10, url="/v1/completions"),
        created_at=NOON, deadline=NOON, max_cost=1.5, refuse_late=True, retry_of="job-0", traceparent=TRACE,
        metadata={"a": "b"},
    ),
    "plan-segment": PlanSegment(
        job="job-1", index=0, attempt="a", first_row=0, end_row=5, blank_lines=1, unselected=1, rejected=1,
        rejects=RejectsRef(number=0, key="r", sha256=SHA, size=1, rows=1), unique=2, prefix_groups=1,
        shared_prefix_tokens=4, max_tokens=20, certain_tokens=1, sequences=2, tokens_per_byte=0.25, shards=(SHARD,),
        last=True,
    ),
    "closing": Closing(kind="cancel", at=NOON, reason="r"),
    "manifest": Manifest(
        job="job-1", status=JobStatus.COMPLETED, counts=DONE, usage=USAGE, repeated_at_most=9, created_at=NOON,
        finished_at=NOON, wall_seconds=1.5, engine_seconds=1.0, tokens_per_second=7.0, total_tokens_per_second=12.0,
        price_per_hour=2.0, cost=0.5, busy_seconds=1.0, cost_per_million_tokens=0.25, ended_by="spend",
        spending=(ModelSpending(model="tiny", busy_seconds=1.0, prompt=5, completion=7, cost=0.5,
                                cost_per_million_tokens=0.25, cost_per_million_output_tokens=0.5),),
        files=(FileEntry(path="results/part-00001.parquet", rows=2, size=9, sha256=SHA),),
        models=(PIN,), engine={"block_size": 16}, versions={"torch": "2"},
        errors=(JobError(code="c", message="m", line=1, param="p"),),
    ),
    "progress": Progress(
        job="job-1", status=JobStatus.IN_PROGRESS, counts=COUNTS, usage=USAGE, shards_total=2, shards_done=1,
        cost=0.5, tokens_left=9, eta=NOON, started_at=NOON, as_of=NOON,
    ),
    "catalog-entry": ENTRY,
    "catalog-entry-adapter": CatalogEntry(pin=PIN.with_adapter("legal", "/adapters/legal", "cd" * 16), max_model_len=9),
    "catalog-entry-merged": CatalogEntry(
        pin=PIN.with_adapter("legal", "/adapters/legal", "cd" * 16, merged=True), max_model_len=9
    ),
    "answer-files": AnswerFiles(
        files=(AnswerFile(key="jobs/job-1/results/part-00001.parquet", sha256=SHA, at=NOON, origin="job-1"),)
    ),
    "cascade": CascadeOutcome(
        steps=(
            CascadeStep(
                job="job-a", model="small", rows=10, accepted=7, rejected={"json_schema": 3}, usage=Usage(prompt=9),
                busy_seconds=2.0, cost=0.5,
            ),
        ),
        min_mean_logprob=-0.5, sampled_rows=4, agreement=0.75, busy_seconds=2.0, cost=0.5, saved_busy_seconds=1.5,
        saved_cost=0.25,
    ),
    "virtual-model": VirtualModel(
        name="auto",
        rules=(
            Rule(
                model="large",
                when=Conditions(
                    prompt_tokens=Between(min=2_000), languages=("de", "en"), tiers=("interactive",),
                    hours="06:00-22:00", max_waiting_requests=4.0,
                    label=LabelCondition(model="difficulty", labels=("hard",), min_score=0.5),
                ),
            ),
            Rule(model="small"),
        ),
        published_at=NOON,
    ),
    "attempt": AttemptRecord(attempt=1, attempt_id="a", worker="w", session="s", started_at=NOON),
    "note": NoteRecord(rows=(1, 2)),
    "end": EndRecord(attempt_id="a", generated=5, worked=WORKED),
    "run": RunRecord(started_at=NOON),
    "planning-failure": PlanningFailure(attempt=1, error="MemoryError", at=NOON),
    "unreadable": UnreadableRecord(worker="w", at=NOON, reason="no such object"),
    "tombstone": Tombstone(job="job-1", at=NOON),
    "kafka-batch": KafkaBatch(
        cluster="c", topic="t", partition=0, tenant="team-a", first=1, last=2, at=NOON, previous=0, sample=1,
        sample_sha256=SHA, refused=1, resent=1,
        groups=(KafkaGroup(tier="bulk", model="tiny", deadline="6h", output_expires_after="30d", job="j", lines="l",
                           size=9, sha256=SHA, rows=1, records="r", traces=(TRACE,)),),
    ),
    "kafka-origin": Origin(batch="b", group=0, reply_to="t"),
    "notice-wanted": WebhookRequest(at=NOON),
    "notice-due": DueWebhook(id="e", type="batch.completed", job="job-1", at=NOON),
    "api-key": ApiKey(id="0" * 16, digest=SHA, tenant="team-a", scopes=(Scope.ADMIN,), created_at=NOON, expires_at=NOON,
                      label="l", max_tokens=9, limits=RateLimits(requests_per_minute=9)),
    "heartbeat": StoredHeartbeat(name="w", models=("k",), held=(("job-1", 1),), waiting_tokens=5, tokens_per_second=9.5,
                                draining=True, price_per_hour=2.0, takes_lane_requests=True),
    "canary-record": CanaryRecord(pin=PIN, answers=(ANSWER,), recorded_at=NOON, worker="w"),
    "canary-failure": CanaryFailure(pin=PIN, reason="r", at=NOON, worker="w"),
    "release": Release(id="n/00001", number=1, mode="canary", stable=ENTRY, candidate=ENTRY, rules=ReleaseRules(),
                       started_at=NOON),
    "release-outcome": ReleaseOutcome(
        release="n/00001", verdict="promoted", by="comparison", reasons=("r",), at=NOON,
        comparison=ReleaseComparison(shards=8, rows=80, failed=1, mended=1, more_errors=BOUNDS, agreement=BOUNDS,
                              latency=BOUNDS, drift=DRIFT),
    ),
    "release-drift": DRIFT,
    "release-canary": CanaryStage(release="n/00001", reasons=("r",), at=NOON),
    "experiment": Experiment(
        number=1,
        name="weights",
        arms=(
            ExperimentArm(name="control", weights=ArmWeights()),
            ExperimentArm(name="less", weights=ArmWeights(ttft=1.0, itl=0.5, utilisation=0.4, drops=2.0)),
        ),
        assignment="worker",
        slice_seconds=60.0,
        carry_over=0.1,
        objective=ArmWeights(ttft=2.0),
        alpha=0.1,
        min_blocks=4,
        max_blocks=8,
        model="tiny",
        started_at=NOON,
    ),
    "experiment-outcome": ExperimentOutcome(by="comparison", reasons=("less is better",), at=NOON),
    "experiment-slice": SliceReport(
        slice=3,
        arm="less",
        worker="w",
        model="tiny",
        counts=SliceCounts(
            first_tokens=9, late_first_tokens=1, later_tokens=90, late_tokens=2, steps=50, throttled_steps=5, drops=1,
            tokens=400, seconds=54.0,
        ),
    ),
    "experiment-block": ClosedBlock(
        block=2, reports=3, unusable=1,
        machines=(MachineCounts(arm="less", machine="gpu", counts=SliceCounts(steps=50, throttled_steps=5)),),
    ),
    "release-requests": RequestSamples(
        release="n/00001", traffic="mirror", at=NOON, dropped=1,
        samples=(
            RequestSample(
                stable=AnswerSample(ttft_seconds=0.5, itl_seconds=0.25, tokens=9), candidate=AnswerSample(failed=True),
                agreement=0.5, lost=True,
            ),
        ),
    ),
    "shadow-head": ShadowHead(release="n/00001", job="job-1", shard=1, worker="w", finished_at=NOON),
    "figures": WorkerMetrics(
        model="tiny", seconds=9.0, tiers={Tier.BULK: TierMetrics(running=1, usage=USAGE, ttft=TIMES)}, computed=9,
        steps=TIMES, pace=SloMetrics(weights=SloWeights(ttft=1.0), terms=SloWeights(itl=0.5), drops=1),
        speculation=SpeculationMetrics(drafted=3, accepted=1, gained=0.5, seconds=1.0),
        policies={"rules": PolicyMetrics(texts={"flag": 2}, failures=1, prompt_tokens=5, completion_tokens=1)},
        adapters={"legal": AdapterMetrics(answered=2, failed=1, usage=USAGE, weights_bytes=9)},
    ),
    "scaling": StoredScaling(as_of=NOON, speeds={"tiny": 9.5}, pools={"tiny": PoolMemory(desired=2, changed=(1.0,))}),
    "stored-file": StoredFile(id="file-0", tenant="team-a", filename="in.jsonl", purpose="batch", size=9, sha256=SHA,
                              created_at=NOON, expires_at=NOON, batch="job-1"),
    "file-reader": Reader(at=NOON),
    "batch-order": BatchOrder(tenant="team-a", input_file_id="file-0", endpoint="/v1/completions",
                              completion_window="24h", at=NOON),
    "batch-outcome": BatchOutcome(output_file_id="file-1", error_file_id="file-2", in_progress_at=NOON, at=NOON),
    "heard": IdempotencyRecord(at=NOON, digest=SHA),
    "dead-letter": DeadLetter(id="d", ingest_source="kafka", place="t", position="0-1", at=NOON, recorded_at=NOON,
                              reason_code="invalid_json", message="m", key="aw==", headers=(("h", "dg=="),), size=9,
                              stored=9, marker="k"),
    "dead-letter-replay": Replay(at=NOON, outcome="o"),
    "owed-letter": UnsentDeadLetter(topic="t", partition=0, offset=1, timestamp=2),
    "taken": TakenMarker(uri="/in.jsonl", stamp="s", job="job-1", at=NOON),
    "celery-ticket": TaskTicket(task="t", tenant="team-a", at=NOON, arguments=SHA),
}  # fmt: skip

EVENTS = {
    "event-job-changed": JobChanged(id="job-1/status", job="job-1", at=NOON, status=JobStatus.FAILED, counts=DONE,
                                    message="m"),
    "event-shard-committed": ShardCommitted(id="job-1/part/1", job="job-1", at=NOON, shard=1, rows=2, attempt=1,
                                            usage=USAGE),
    "event-release-ended": ReleaseEnded(id="n/00001/ended", at=NOON, model="tiny", release=1, stable=f"sha256:{SHA}",
                                        candidate=f"sha256:{SHA}", verdict="promoted", by="comparison", reasons=("r",)),
    "event-progress": ProgressMade(id="job-1/progress/1", job="job-1", at=NOON, counts=COUNTS, usage=USAGE),
}  # fmt: skip

REPORT = PolicyReport((ContentVerdict("rules", "medical", "route", "prompt", "big"),), 5, 1)
LANE = {
    "lane-tokens": TokensEvent("r1", 1, 0, 0, (5, 6), "hi", {"content": []}, [{"index": 0}]),
    "lane-end": EndEvent("r1", 1, 1, {"id": "x"}, "p1"),
    "lane-error": ErrorEvent("r1", 1, 1, "c", "m", 503, "p"),
    "lane-hand-back": HandBackEvent("r1", 1, 1),
    "lane-route": HandBackEvent("r1", 1, 1, route=Route("key", "big", REPORT)),
}
REQUEST = LaneRequest(
    "r1",
    "key",
    {"model": "tiny"},
    "/v1/completions",
    deadline=NOON,
    tenant="t",
    attempt=2,
    tokens=((1,),),
    traceparent=TRACE,
    queue="@w",
)
TASK = b'[["job-1", 1, 1], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'

HEAD = CheckpointHead(
    job="job-1", shard=1, attempt_id="a", sequence=0, final=True, generated=9, exposed=4, worked=WORKED
)
LOGGED = LoggedChoice(
    3, 0, 0, np.array([5, 6], dtype=np.int32), "stop", 2,
    LoggedLogprobs(np.array([-0.5, -1.0], dtype=np.float32), np.array([[5], [6]], dtype=np.int32),
                   np.array([[-0.5], [-1.0]], dtype=np.float32)),
)  # fmt: skip
ROWS = [
    ResultRow(
        custom_id="a", row=0, status=RowStatus.SUCCEEDED, status_code=200, text="hi", finish_reason="stop",
        response='{"id": "x"}', model="tiny", prompt_tokens=5, cached_tokens=1, completion_tokens=7,
        embedding=[0.5, 1.0], created_at=NOON, started_at=NOON, finished_at=NOON, attempt=1,
    ),
    ResultRow.from_error(1, "b", RowError(RowErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"), model="tiny", attempt=1),
]  # fmt: skip
SUMMARY = PartSummary(
    job="job-1", part=1, attempt=1, attempt_id="a", worker="w", counts=DONE, usage=USAGE, started_at=NOON,
    committed_at=NOON, engine_started_at=NOON, engine_finished_at=NOON, engine={"block_size": 16},
    versions={"torch": "2"}, exposed=4, accounted={"a": 7}, worked={"a": WORKED},
)  # fmt: skip
CARRIED = pa.schema([pa.field("topic", pa.string()), pa.field("status", pa.int64())])


@dataclass(frozen=True, slots=True)
class Golden:
    """A file: its bytes as they are written today, and today's reader, as plain data that can be compared."""

    data: bytes
    read: Callable[[bytes], Any]


def samples() -> dict[str, Golden]:
    """All of them, by their files' names."""
    made = {f"{name}.json": Golden(record.to_json(), _record_reader(type(record))) for name, record in RECORDS.items()}
    for name, event in EVENTS.items():
        made[f"{name}.json"] = Golden(event.to_json(), lambda data: _plain(read_event(data)))
    for name, one in LANE.items():
        made[f"{name}.json"] = Golden(event_json(one), lambda data: json.loads(event_json(read_lane_event(data))))
    made["lane-request.json"] = Golden(
        request_json(REQUEST), lambda data: json.loads(request_json(read_lane_request(data)))
    )
    made["queue-task.json"] = Golden(TASK, lambda data: list(_task(data)))
    made["checkpoint.bin"] = Golden(encode(HEAD, FinishedRows(ROWS, [USAGE] * 2), [LOGGED]), _read_checkpoint)
    made["part.parquet"] = Golden(_parquet(_part()), read_table)
    made["shard.parquet"] = Golden(_parquet(_shard()), read_table)
    return made


def _plain(record: StoredModel) -> Any:
    """The content of the bytes, without the current reader's defaults."""
    return record.model_dump(mode="json", exclude_unset=True)


def _record_reader(kind: type[StoredModel]) -> Callable[[bytes], Any]:
    return lambda data: _plain(parse_stored("a golden file", data, kind))


def _task(data: bytes) -> tuple[str, int, int]:
    read = task_arguments(data)
    return read.job, read.shard, read.attempt


def _read_checkpoint(data: bytes) -> Any:
    found = decode(data)
    running = [
        {"row": one.row, "start": one.start, "token_ids": one.token_ids.tolist(), "stop_token_id": one.stop_token_id,
         "logprobs": None if one.logprobs is None else one.logprobs.chosen.tolist()}
        for one in found.running
    ]  # fmt: skip
    return {
        "head": _plain(found.head),
        "finished": found.finished.to_pylist(),
        "running": running,
    }


def read_table(data: bytes) -> Mapping[str, Any]:
    """Rows and footer."""
    table = pq.read_table(pa.BufferReader(data))
    footer = (table.schema.metadata or {}).get(FOOTER_KEY.encode())
    summary = None if footer is None else _plain(parse_stored("a golden part", footer, PartSummary))
    return {"rows": table.to_pylist(), "summary": summary}


def _part() -> pa.Table:
    table = results_table(ROWS)
    schema = result_schema(CARRIED)
    for field, values in zip(list(schema)[table.num_columns :], (["x", None], [1, 2]), strict=True):
        table = table.append_column(field, pa.array(values, field.type))
    return table.replace_schema_metadata({FOOTER_KEY: SUMMARY.model_dump_json(exclude_none=True)})


def _shard() -> pa.Table:
    values: dict[str, list[Any]] = {
        "row": [0, 1], "compute_row": [0, 0], "custom_id": ["a", "b"], "url": ["/v1/completions"] * 2,
        "body": ['{"prompt": "x"}', ""], "model": ["tiny"] * 2, "request_hash": [bytes(16)] * 2,
        "prefix_group": [1, None], "prefix_readers": [1, None], "estimated_prompt_tokens": [5, 5],
        "expected_tokens": [7, 7],
    }  # fmt: skip
    arrays = [pa.array(values[field.name], field.type) for field in SHARD_FIELDS]
    carried = [pa.array(["x", None], pa.string()), pa.array([1, 2], pa.int64())]
    return pa.table([*arrays, *carried], schema=shard_schema(CARRIED))


def _parquet(table: pa.Table) -> bytes:
    body = io.BytesIO()
    pq.write_table(table, body, compression="zstd")
    return body.getvalue()
