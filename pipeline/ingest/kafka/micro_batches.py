"""The micro-batches of a partition: the assignment of records to jobs, decided by one object that is created if absent.

A batch is named by its first offset and records its last. Its lines are in objects that are named by their content and
written before it. So a visible batch has everything that its jobs need, and two consumers that gathered different
batches from the same offset agree on the first one stored.

    intake/kafka/CLUSTER/TOPIC/PARTITION/FIRST.json          the batch
    intake/kafka/CLUSTER/TOPIC/PARTITION/lines/FIRST-HASH.*  .jsonl: input lines; .parquet: the records behind them
    intake/origins/JOB.json                                  which batch (or record) a job came from, until announced
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AwareDatetime

from pipeline.ingest.intake import JobDraft
from pipeline.ingest.kafka.records import AcceptedRecord, GroupKey, Record, SortedRecords
from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore
from schemas.identifiers import Traceparent
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.stored import Count, Sha256, StoredModel

MAX_TRACES: Final = 128
"""Maximum number of stored traces of one group; OpenTelemetry's SDK allows no more links of a span by default."""
INTAKE: Final = "intake/kafka/"
ORIGINS: Final = "intake/origins/"
_DIGITS: Final = 20
_PREFIX_DIGITS: Final = (16, 12, 8, 0)
"""Numbers of leading digits that a batch may share with an offset, tried from the nearest batches on."""
_MAX_TIMESTAMP: Final = 253_402_300_799_999  # the end of the year 9999, in milliseconds

RECORDS_SCHEMA: Final = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("reply_to", pa.string()),
        pa.field("digest", pa.binary(), nullable=False),
        pa.field("headers", pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])), nullable=False),
        pa.field("original", pa.binary()),  # the value where it is not the line itself
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionId:
    """The unique id of a partition: `cluster` distinguishes the topic from others of its name, earlier ones
    included."""

    cluster: str
    topic: str
    partition: int
    tenant: str

    @property
    def folder(self) -> str:
        """The prefix of its batches."""
        return f"{INTAKE}{self.cluster}/{self.topic}/{self.partition:05d}/"

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class KafkaGroup(StoredModel):
    """Records of a batch that form one job: their common headers, and the keys of their lines and records. `traces`:
    the distinct producers' traces, if ingest traces and they are known, up to `MAX_TRACES`."""

    tier: str | None = None
    model: str | None = None
    deadline: str | None = None
    output_expires_after: str | None = None
    job: str | None = None
    lines: str
    size: Count
    sha256: Sha256
    rows: Count
    records: str
    traces: tuple[Traceparent, ...] | None = None

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.tier, self.model, self.deadline, self.output_expires_after, self.job)


class KafkaBatch(StoredModel):
    """`FIRST.json`. Covers offsets `first` up to, and including, `last`, some of which may hold no record.

    Attributes:
        at: when it was created; its jobs' ids are derived from it and sort by it.
        previous: first offset of the previous batch, as far as its creator knew.
        sample, sample_sha256: offset of a record, and a digest of its value, which detect another topic.
        refused, resent: numbers of records that became dead letters, and of resent records.
    """

    version: Literal[1] = 1
    cluster: str
    topic: str
    partition: Count
    tenant: str
    first: Count
    last: Count
    at: AwareDatetime
    groups: tuple[KafkaGroup, ...] = ()
    previous: Count | None = None
    sample: Count
    sample_sha256: Sha256
    refused: Count = 0
    resent: Count = 0


class Origin(StoredModel):
    """`intake/origins/JOB.json`: the origin of a job from Kafka, until its results are published.

    Attributes:
        batch, group: the batch's key, and the index of the job's group in it.
        reply_to: for a job by reference, a further topic for its results.
    """

    version: Literal[1] = 1
    batch: str | None = None
    group: Count | None = None
    reply_to: str | None = None


def batch_key(partition_id: PartitionId, first: int) -> str:
    """Key of the batch that begins at `first`."""
    return f"{partition_id.folder}{first:0{_DIGITS}d}.json"


def origin_key(job: str) -> str:
    """Key of a job's origin."""
    return f"{ORIGINS}{job}.json"


def moment(timestamp: int) -> datetime:
    """A record's timestamp as a moment (milliseconds; -1 for none; out-of-range values of producers are clamped)."""
    return datetime.fromtimestamp(min(max(timestamp, 0), _MAX_TIMESTAMP) // 1000, UTC)


def value_digest(record: Record) -> str:
    """The digest that identifies a record's value."""
    return hashlib.sha256(b"\0" if record.value is None else b"\1" + record.value).hexdigest()


def store_groups(
    store: ObjectStore, partition_id: PartitionId, first: int, found: SortedRecords, *, traced: bool = False
) -> tuple[KafkaGroup, ...]:
    """Write each group's lines and records; identical ones are found, not written twice. `traced`: store the producers'
    traces."""
    groups = (_store_group(store, partition_id, first, key, accepted) for key, accepted in found.groups.items())
    if not traced:
        return tuple(groups)
    return tuple(
        group.model_copy(update={"traces": _traces(accepted)})
        for group, accepted in zip(groups, found.groups.values(), strict=True)
    )


def load_batch(store: ObjectStore, key: str) -> KafkaBatch | None:
    """Read a stored batch; None when there is none. Raises `LedgerError` for a damaged one."""
    try:
        data = store.read(key)
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(key), data, KafkaBatch)


def load_origin(store: ObjectStore, job: str) -> Origin | None:
    """Read the job's origin; None if it didn't come from Kafka, or its results are published."""
    try:
        data = store.read(origin_key(job))
    except ObjectNotFound:
        return None
    return parse_stored(store.locate(origin_key(job)), data, Origin)


def floor_batch(store: ObjectStore, partition_id: PartitionId, offset: int) -> KafkaBatch | None:
    """The last batch that begins at or before `offset`."""
    name = f"{offset:0{_DIGITS}d}"
    for digits in _PREFIX_DIGITS:
        best = None
        for info in store.list(partition_id.folder + name[:digits]):
            first = info.key.removeprefix(partition_id.folder).removesuffix(".json")
            if not first.isdigit() or int(first) > offset:
                break  # keys are in order; the folder of lines sorts after the digits
            best = info.key
        if best is not None:
            return load_batch(store, best)
    return None


def drafts(store: ObjectStore, batch: KafkaBatch) -> list[JobDraft]:
    """The batch's jobs, one for each group: a function of the stored batch alone."""
    return [_draft(store, batch, index, group) for index, group in enumerate(batch.groups)]


def group_records(store: ObjectStore, group: KafkaGroup, columns: Sequence[str]) -> pa.Table:
    """The records behind a group's lines, in row order."""
    return pq.read_table(pa.BufferReader(store.read(group.records)), columns=list(columns))


def original_records(store: ObjectStore, group: KafkaGroup) -> Iterator[Record]:
    """A group's records as received."""
    lines = store.read(group.lines).split(b"\n")
    for found in group_records(store, group, RECORDS_SCHEMA.names).to_pylist():
        value = lines[found["row"]] if found["original"] is None else found["original"]
        headers = tuple((header["name"], header["value"]) for header in found["headers"])
        yield Record(found["offset"], found["timestamp"], found["key"], value, headers)


def _draft(store: ObjectStore, batch: KafkaBatch, index: int, group: KafkaGroup) -> JobDraft:
    uri = store.locate(group.lines)
    file = InputFile(uri=uri, size=group.size, sha256=group.sha256)
    identity = (batch.cluster, batch.topic, str(batch.partition), str(batch.first), str(index))
    return JobDraft(
        input=InputRef(uri=uri, format=InputFormat.JSONL, files=(file,)),
        options=group.key.options(),
        tenant=batch.tenant,
        job_id=derived_job_id(batch.at, "kafka", *identity),
    )


def _store_group(
    store: ObjectStore, partition_id: PartitionId, first: int, key: GroupKey, accepted: Sequence[AcceptedRecord]
) -> KafkaGroup:
    lines = b"".join(one.line + b"\n" for one in accepted)
    digest = hashlib.sha256(lines).hexdigest()
    lines_key = _content_key(partition_id, first, digest, "jsonl")
    store.create(lines_key, lines)
    records = io.BytesIO()
    pq.write_table(_records_table(accepted), records, compression="zstd")
    records_key = _content_key(partition_id, first, hashlib.sha256(records.getvalue()).hexdigest(), "parquet")
    store.create(records_key, records.getvalue())
    return KafkaGroup(
        tier=key.tier, model=key.model, deadline=key.deadline, output_expires_after=key.output_expires_after,
        job=key.job, lines=lines_key, size=len(lines), sha256=digest, rows=len(accepted), records=records_key,
    )  # fmt: skip


def _traces(accepted: Sequence[AcceptedRecord]) -> tuple[str, ...] | None:
    traces = (one.record.traceparent for one in accepted)
    return tuple(islice(dict.fromkeys(trace for trace in traces if trace is not None), MAX_TRACES)) or None


def _content_key(partition_id: PartitionId, first: int, digest: str, kind: str) -> str:
    return f"{partition_id.folder}lines/{first:0{_DIGITS}d}-{digest[:32]}.{kind}"


def _records_table(accepted: Sequence[AcceptedRecord]) -> pa.Table:
    records = [one.record for one in accepted]
    columns: dict[str, Sequence[Any]] = {
        "row": range(len(accepted)),
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp for record in records],
        "key": [record.key for record in records],
        "reply_to": [one.reply_to for one in accepted],
        "digest": [one.digest for one in accepted],
        "headers": [[{"name": name, "value": value} for name, value in record.headers] for record in records],
        "original": [None if one.record.value == one.line else one.record.value for one in accepted],
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in RECORDS_SCHEMA], schema=RECORDS_SCHEMA)
