"""A job that reads from S3 reads what was there when it was accepted, or stops with one line."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.s3.client import S3Connection
from pipeline.inputs.open import open_pinned, pin_uri
from pipeline.inputs.s3 import PinnedS3Input, pin_s3_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import DifferentJob, submit
from pipeline.ledger.ledger import JobLedger
from pipeline.planner import InputError
from pipeline.ports import StoreError, World
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import JobSettings, OnInvalid
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODEL, order
from tests.pipeline.s3_stores import settings_for
from tests.pipeline.simulation import MemoryStore, simulated_world
from tests.servers.moto import MotoServer
from tests.servers.s3 import S3Server
from tests.servers.seaweedfs import SeaweedServer

ROWS = 12


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> S3Server:
    name = {"moto": "s3_server", "seaweedfs": "durable_s3_server"}[request.param]
    found: MotoServer | SeaweedServer = request.getfixturevalue(name)
    return found


@pytest.fixture(
    params=[
        pytest.param(True, id="versioned"),
        pytest.param(False, id="plain", marks=pytest.mark.exhaustive),
    ]
)
def versioned(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def bucket(server: S3Server, unique_name: Callable[[], str], versioned: bool) -> str:
    return server.make_bucket(unique_name(), versioned=versioned)


@pytest.fixture
def s3(server: S3Server, tmp_path: Path) -> S3Connection:
    return S3Connection(settings_for(server, tmp_path, read_bytes=1_000))


def lines(word: str) -> bytes:
    made = []
    for row in range(ROWS):
        body = {"model": MODEL, "prompt": f"{word} {row}", "max_tokens": 8}
        made.append(json.dumps({"custom_id": f"id-{row}", "method": "POST", "url": "/v1/completions", "body": body}))
    return "\n".join(made).encode()


def parquet(word: str) -> bytes:
    table = pa.table(
        {"custom_id": [f"id-{row}" for row in range(ROWS)], "prompt": [f"{word} {r}" for r in range(ROWS)]}
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=5)
    return sink.getvalue()


def prompts(ledger: JobLedger) -> list[str]:
    """The prompts of all planned rows, in input order."""
    rows = [
        row
        for segment in ledger.segments()
        for shard in segment.shards
        for row in pq.read_table(pa.BufferReader(ledger.read_shard(shard))).to_pylist()
    ]
    return [json.loads(row["body"])["prompt"] for row in sorted(rows, key=lambda row: row["row"])]


class ReplacingStore(MemoryStore):
    """A store that calls `then` before it creates the second segment's shard."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def create(self, key: str, data: bytes | Path) -> bool:
        if "shards/00002" in key:
            self._then()
        return super().create(key, data)


def plan_it(world: World, pinned: InputRef, s3: S3Connection, on_invalid: OnInvalid = OnInvalid.ROW) -> JobLedger:
    ledger = JobLedger(world.store)
    plan = JobSettings(plan=PlanSettings(segment_rows=4, first_segment_rows=4), on_invalid=on_invalid)
    job = submit(order(input=pinned, settings=plan), ledger, world).job
    plan_job(ledger, job, world, open_input=partial(open_pinned, s3=s3))
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("in.jsonl", lines), ("in.parquet", parquet)])
def test_given_an_object_in_s3_when_its_job_is_planned_then_the_plan_holds_its_rows(
    server: S3Server, bucket: str, s3: S3Connection, tmp_path: Path, versioned: bool, name: str,
    make: Callable[[str], bytes],
) -> None:  # fmt: skip
    server.client().put_object(Bucket=bucket, Key=f"incoming/{name}", Body=make("old"))

    pinned = pin_uri(f"s3://{bucket}/incoming/{name}", s3=s3)

    (file,) = pinned.files
    assert (file.uri, file.size) == (f"s3://{bucket}/incoming/{name}", len(make("old")))
    assert (file.version is not None, file.etag is not None) == (versioned, True)
    assert InputRef.model_validate_json(pinned.to_json()) == pinned
    assert prompts(plan_it(simulated_world(tmp_path), pinned, s3)) == [f"old {row}" for row in range(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("in.jsonl", lines), ("in.parquet", parquet)])
def test_given_an_object_that_is_replaced_while_its_job_is_planned_then_the_two_are_never_mixed(
    server: S3Server, bucket: str, s3: S3Connection, tmp_path: Path, versioned: bool, name: str,
    make: Callable[[str], bytes],
) -> None:  # fmt: skip
    put = partial(server.client().put_object, Bucket=bucket, Key=name)
    put(Body=make("old"))
    pinned = pin_s3_input(f"s3://{bucket}/{name}", s3)
    world = simulated_world(tmp_path)
    store = ReplacingStore(lambda: put(Body=make("new")))
    world = World(store, world.clock, world.random, tmp_path)

    if versioned:
        assert prompts(plan_it(world, pinned, s3)) == [f"old {row}" for row in range(ROWS)]
    else:
        with pytest.raises(InputError, match=rf"{name}: was replaced after the job was accepted.*; put the old object"):
            plan_it(world, pinned, s3)
        assert prompts(JobLedger(store)) == [f"old {row}" for row in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_given_an_object_that_changed_after_it_was_pinned_when_it_is_looked_at_then_one_line_says_so(
    server: S3Server, bucket: str, s3: S3Connection, versioned: bool, change: str
) -> None:
    client, location = server.client(), {"Bucket": bucket, "Key": "in.jsonl"}
    client.put_object(**location, Body=b"one\n")
    watched = PinnedS3Input(pin_s3_input(f"s3://{bucket}/in.jsonl", s3), s3)
    (file,) = watched.files()
    watched.check()
    if change == "replaced":
        client.put_object(**location, Body=b"two\n")
    else:
        client.delete_object(**location)

    if versioned:  # the old version is there until it is deleted by its version's id
        watched.check()
        assert file.open().read() == b"one\n"
        for version in client.list_object_versions(Bucket=bucket)["Versions"]:
            client.delete_object(**location, VersionId=version["VersionId"])
    gone = versioned or change == "deleted"
    for look in (watched.check, lambda: file.open().read()):
        with pytest.raises(InputError, match="gone since the job was accepted" if gone else "was replaced") as caught:
            look()
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_object_stored_by_ingest_may_be_pinned_by_its_hash(
    server: S3Server, bucket: str, s3: S3Connection, versioned: bool
) -> None:
    data = b'{"a": 1}\n' * 200_000
    server.client().put_object(Bucket=bucket, Key="own.jsonl", Body=data)
    file = InputFile(uri=f"s3://{bucket}/own.jsonl", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    pinned = InputRef(uri=file.uri, format=InputFormat.JSONL, files=(file,))
    opened = PinnedS3Input(pinned, s3)
    with opened.files()[0].open() as stream:
        assert stream.read() == data
    opened.check()
    server.client().put_object(Bucket=bucket, Key="own.jsonl", Body=data[::-1])
    if versioned:
        opened.check()
    else:
        with pytest.raises(InputError, match="was replaced after the job was accepted"):
            opened.check()
    with pytest.raises(InputError, match="holds other bytes than when the job was accepted"):
        PinnedS3Input(pinned, s3)


@pytest.mark.slow
def test_the_files_below_a_prefix_are_one_input(server: S3Server, bucket: str, s3: S3Connection) -> None:
    for key in (
        "d/b.jsonl",
        "d/a.jsonl",
        "d/",
        "d/README",
        "d/a.job.json",
        "d/deeper/c.jsonl",
        "d.jsonl",
        "e/x.parquet",
    ):
        server.client().put_object(Bucket=bucket, Key=key, Body=key.encode())
    pinned = pin_s3_input(f"s3://{bucket}/d/", s3)
    assert (pinned.uri, pinned.format) == (f"s3://{bucket}/d/", InputFormat.JSONL)
    assert [file.uri for file in pinned.files] == [f"s3://{bucket}/d/a.jsonl", f"s3://{bucket}/d/b.jsonl"]
    opened = PinnedS3Input(pinned, s3)
    opened.check()
    assert [file.open().read() for file in opened.files()] == [b"d/a.jsonl", b"d/b.jsonl"]
    with pytest.raises(InputError, match=r"holds no \.jsonl, \.csv"):
        pin_s3_input(f"s3://{bucket}/d/deeper/none/", s3)


@pytest.mark.slow
def test_a_version_that_an_event_names_is_taken_and_not_the_newest(
    server: S3Server, unique_name: Callable[[], str], s3: S3Connection
) -> None:
    bucket = server.make_bucket(unique_name(), versioned=True)
    first = server.client().put_object(Bucket=bucket, Key="in.jsonl", Body=b"1\n")["VersionId"]
    server.client().put_object(Bucket=bucket, Key="in.jsonl", Body=b"22\n")
    pinned = pin_s3_input(f"s3://{bucket}/in.jsonl", s3, version=first)
    assert (pinned.files[0].version, pinned.files[0].size) == (first, 2)
    assert PinnedS3Input(pinned, s3).files()[0].open().read() == b"1\n"


@pytest.mark.slow
def test_the_same_order_again_finds_its_job_and_another_object_is_another_order(
    server: S3Server, bucket: str, s3: S3Connection, tmp_path: Path
) -> None:
    put = partial(server.client().put_object, Bucket=bucket, Key="in.jsonl")
    put(Body=lines("old"))
    world = simulated_world(tmp_path)
    ledger = JobLedger(world.store)
    first = submit(order(input=pin_s3_input(f"s3://{bucket}/in.jsonl", s3)), ledger, world)
    again = submit(order(input=pin_s3_input(f"s3://{bucket}/in.jsonl", s3)), ledger, world)
    assert (first.created, again.created, again.job) == (True, False, first.job)
    put(Body=lines("new"))
    with pytest.raises(DifferentJob, match=r"input\.etag was"):
        submit(order(input=pin_s3_input(f"s3://{bucket}/in.jsonl", s3)), ledger, world)


def test_what_cannot_be_pinned_is_refused(server: S3Server, bucket: str, s3: S3Connection) -> None:
    server.client().put_object(Bucket=bucket, Key="in.txt", Body=b"")
    server.client().put_object(Bucket=bucket, Key="in.jsonl.bz2", Body=b"")
    for key, said in (
        ("none.jsonl", "no such object; check the input's URL"),
        ("in.txt", r"is no \.jsonl, \.csv"),
        ("in.jsonl.bz2", r"only \.jsonl and \.csv are read compressed"),
    ):
        with pytest.raises(InputError, match=said):
            pin_s3_input(f"s3://{bucket}/{key}", s3)
    with pytest.raises(StoreError, match="carries credentials or a signature"):
        pin_uri(f"s3://{bucket}/in.jsonl?X-Amz-Signature=hush", s3=s3)
    bare = InputRef(
        uri="s3://b/in.jsonl", format=InputFormat.JSONL, files=(InputFile(uri="s3://bbb/in.jsonl", size=1),)
    )
    with pytest.raises(InputError, match="was pinned neither to a version, an ETag nor a hash"):
        open_pinned(bare, s3)


@pytest.mark.slow
def test_given_a_bucket_whose_versions_are_suspended_then_the_etag_is_pinned(
    server: S3Server, unique_name: Callable[[], str], s3: S3Connection
) -> None:
    """Its newest version is called "null" and changes with the next upload."""
    client: Any = server.client()
    bucket = server.make_bucket(unique_name(), versioned=True)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    client.put_object(Bucket=bucket, Key="in.jsonl", Body=b"1\n")
    pinned = pin_s3_input(f"s3://{bucket}/in.jsonl", s3)
    assert pinned.files[0].version is None
    client.put_object(Bucket=bucket, Key="in.jsonl", Body=b"2\n")
    with pytest.raises(InputError, match="was replaced"):
        PinnedS3Input(pinned, s3).check()
