"""Uploads and downloads: bounded, and complete or absent for any input."""

from __future__ import annotations

import gzip
import io
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.files.downloads import UnsatisfiableRange, parse_range, read_range
from pipeline.gateway.files.uploads import FormReader
from pipeline.gateway.http.errors import ApiError
from pipeline.maintenance.retention import RemovedKind, RetentionSettings, RetentionSweep
from schemas.settings.gateway import GatewayOptions
from tests.pipeline.gateway.batches.test_batches import wait
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.planner.readers.arrow_files import arrow
from tests.waiting import HANG_SECONDS

SMALL = GatewayOptions(max_upload_bytes=100_000, max_body_bytes=10_000, idle_seconds=0.5)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path_factory.mktemp("harness"), settings=SMALL) as harness:
        yield harness


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    """Parts with their whole headers."""
    made = b"".join(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts)
    return made + f"--{boundary}--\r\n".encode()


FIELD = 'Content-Disposition: form-data; name="%s"'
PURPOSE = (FIELD % "purpose", b"batch")
FILE = ('Content-Disposition: form-data; name="file"; filename="a.jsonl"', b"{}\n")


@given(content=st.binary(min_size=1, max_size=500), cuts=st.lists(st.integers(0, 900), max_size=8), first=st.booleans())
def test_a_form_is_parsed_for_any_split_of_its_bytes(content: bytes, cuts: list[int], first: bool) -> None:
    parts = [PURPOSE, (FILE[0], content)]
    data = form(*(parts if first else parts[::-1]), boundary="a-rather-long-boundary-0123456789")
    reader, got = FormReader(b"a-rather-long-boundary-0123456789", 1_000), b""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(edges):
        reader.feed(data[start:end])
        got += reader.take()
    reader.end()
    assert (got, reader.filename) == (content, "a.jsonl")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (form(PURPOSE, FILE)[:-8], "invalid_form"),
        (form(PURPOSE), "invalid_request"),
        (form(FILE), "invalid_request"),
        (form(PURPOSE, FILE, FILE), "invalid_request"),
        (form(PURPOSE, PURPOSE, FILE), "invalid_request"),
        (form((PURPOSE[0], b"fine-tune"), FILE), "invalid_request"),
        (form(PURPOSE, (FILE[0], b"")), "invalid_request"),
        (form(PURPOSE, (FIELD % "other", b"x"), FILE), "invalid_request"),
        (form((PURPOSE[0], b"x" * 5_000), FILE), "invalid_form"),
        (form((PURPOSE[0] + "\r\nX: " + "y" * 20_000, b"batch"), FILE), "invalid_form"),
        (form(*[PURPOSE] * 50, FILE), "invalid_request"),
        (b"\x00" * 100, "invalid_form"),
        (
            form(PURPOSE, ('Content-Disposition: form-data; name="expires_after[seconds]"', b"x"), FILE),
            "invalid_request",
        ),
        (form(PURPOSE, (FILE[0], b"x" * 1_001)), "file_too_large"),
    ],
)
def test_invalid_uploads_are_refused(body: bytes, code: str) -> None:
    def read() -> None:
        reader = FormReader(b"b", 1_000)
        for start in range(0, len(body), 100):
            reader.feed(body[start : start + 100])
        reader.end()

    with pytest.raises(ApiError) as refused:
        read()
    assert refused.value.code == code


@pytest.mark.slow
def test_too_large_uploads_are_refused_and_leave_no_files(harness: HttpHarness) -> None:
    client = harness.client()
    with pytest.raises(openai.APIStatusError) as received:
        client.files.create(file=("a.jsonl", b"x" * 300_000), purpose="batch")
    assert received.value.status_code == 413

    def chunks() -> Iterator[bytes]:  # its length isn't received
        yield form(PURPOSE, (FILE[0], b""))[:-7]
        for _ in range(20):
            yield b"x" * 10_000

    with harness.http() as http:
        answer = http.post("/v1/files", content=chunks(), headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 413
        json = {"Content-Type": "application/json"}
        assert http.post("/v1/batches", content=b"x" * 10_001, headers=json).status_code == 413
        assert http.post("/v1/files", content=b"x").status_code == 415
    assert not list(harness.world.scratch.glob("upload-*"))


def test_a_body_that_stops_midway_times_out(harness: HttpHarness) -> None:
    host, port = harness.url.removeprefix("http://").split(":")
    head = f"POST /v1/files HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(f"{head}Content-Length: 5000\r\n\r\n".encode() + form(PURPOSE, FILE)[:100])
        slow.settimeout(HANG_SECONDS)
        assert b" 408 " in slow.recv(65_536)
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(f"{head}Content-Length: 5000\r\n\r\n".encode() + form(PURPOSE, FILE)[:100])
    until = time.monotonic() + HANG_SECONDS
    while list(harness.world.scratch.glob("upload-*")):
        assert time.monotonic() < until
        time.sleep(0.02)


def elsewhere(harness: HttpHarness) -> set[Path]:
    """Files that are not where uploads belong."""
    everything = harness.world.scratch.parent.parent.parent.rglob("*")
    return {path for path in everything if path.is_file() and "files" not in path.parts}


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a\x00b", "ü 文.jsonl", 'a";x="', "x" * 2_000, "."]
)
def test_a_filename_is_data(harness: HttpHarness, name: str) -> None:
    before = {
        path for path in harness.world.scratch.parent.parent.rglob("*") if path.is_file() and "files" not in path.parts
    }
    client = harness.client()
    try:
        file = client.files.create(file=(name, lines(1)), purpose="batch")
    except openai.BadRequestError:
        return
    assert client.files.content(file.id).content == lines(1)
    shown = client.files.retrieve(file.id).filename
    assert len(shown) <= 255
    assert shown.isprintable()
    after = {
        path for path in harness.world.scratch.parent.parent.rglob("*") if path.is_file() and "files" not in path.parts
    }
    assert after == before


def test_range_and_conditional_requests_of_a_file(harness: HttpHarness) -> None:
    content = lines(5)
    file = harness.client().files.create(file=("a.jsonl", content), purpose="batch")
    where = f"/v1/files/{file.id}/content"
    with harness.http() as http:
        whole = http.get(where)
        assert whole.headers["content-length"] == str(len(content))
        tag = whole.headers["etag"]
        part = http.get(where, headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])
        assert part.headers["content-range"] == f"bytes 10-19/{len(content)}"
        assert http.get(where, headers={"Range": "bytes=-7"}).content == content[-7:]
        behind = http.get(where, headers={"Range": f"bytes={len(content)}-"})
        assert (behind.status_code, behind.headers["content-range"]) == (416, f"bytes */{len(content)}")
        assert http.get(where, headers={"If-None-Match": tag}).status_code == 304
        stale = http.get(where, headers={"Range": "bytes=0-1", "If-Range": '"other"'})
        assert (stale.status_code, stale.content) == (200, content)


@given(size=st.integers(0, 50), first=st.integers(0, 60) | st.none(), last=st.integers(0, 60) | st.none())
def test_a_range_is_equal_to_a_slice(size: int, first: int | None, last: int | None) -> None:
    data = bytes(range(size))
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is None:
        expected = data if last is None else data[-last:] if last else b""
    else:
        expected = data[first:] if last is None else data[first : last + 1] if last >= first else data
    try:
        wanted = parse_range(header, size)
    except UnsatisfiableRange:
        assert not expected
        return
    got = b"".join(read_range(io.BytesIO(data), range(size) if wanted is None else wanted))
    assert got == expected


@pytest.mark.slow
def test_files_of_each_format_can_be_uploaded(tmp_path: Path) -> None:
    """Bytes tell the formats apart, and a name only CSV from JSONL."""
    table = pa.table({"custom_id": ["a", "b"], "prompt": ["one", "two"]})
    parquet = io.BytesIO()
    pq.write_table(table, parquet)
    zstd, text = pa.Codec("zstd"), b"custom_id,prompt\na,one\nb,two\n"
    rows = lines(2, "/v1/completions")
    uploads = [
        ("nameless", parquet.getvalue()),
        ("requests.jsonl", arrow(table, "file")),
        ("table.arrow", arrow(table, "stream")),
        ("table.csv", text),
        ("TABLE.CSV.GZ", gzip.compress(text)),
        ("nameless", zstd.compress(rows, asbytes=True)),
        ("requests.jsonl.gz", gzip.compress(rows)),
    ]
    with run_http_harness(tmp_path) as harness:
        client = harness.client()
        for name, data in uploads:
            file = client.files.create(file=(name, data), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
                extra_body={"tokenmill": {"model": "tiny"}},
            )  # fmt: skip
            done = wait(client, batch.id)
            assert done.status == "completed", (name, done)
            assert done.request_counts is not None
            assert done.request_counts.total == 2, (name, done)
        file = client.files.create(file=("table.csv.gz", gzip.compress(text)[:-3]), purpose="batch")
        failed = wait(client, client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h",
            extra_body={"tokenmill": {"model": "tiny"}},
        ).id)  # fmt: skip
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert "can't be decompressed as gzip" in str(failed.errors.data[0].message)


@pytest.mark.slow
def test_expired_files_are_removed_unless_an_open_batch_reads_them(tmp_path: Path) -> None:
    life: Any = {"anchor": "created_at", "seconds": 3_600}
    with run_http_harness(tmp_path, permits=0) as harness:
        client = harness.client()
        read, free, retained = (
            client.files.create(file=("a.jsonl", lines(1)), purpose="batch", **more)
            for more in ({"expires_after": life}, {"expires_after": life}, {})
        )
        assert free.expires_at == free.created_at + 3_600
        batch = client.batches.create(
            input_file_id=read.id, endpoint="/v1/chat/completions", completion_window="24h",
            extra_headers={"Idempotency-Key": "k"},
        )  # fmt: skip
        store = harness.world.store
        harness.clock.ahead = 7_200
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(free.id)
        counted = RetentionSweep(harness.world, dry_run=True).run()
        found = RetentionSweep(harness.world).run()
        assert found.objects == counted.objects
        assert found.objects[RemovedKind.FILE] == 4, "content, two markers, record"
        assert not list(store.list(f"files/{free.id}/"))
        assert list(store.list(f"files/{read.id}/content"))
        assert list(store.list(f"files/{retained.id}/content"))
        harness.permits.release(10)
        assert wait(client, batch.id).status == "completed"
        RetentionSweep(harness.world).run()
        assert not list(store.list(f"files/{read.id}/"))
        assert [file.purpose for file in client.files.list()] == ["batch_output", "batch"]
        # What an upload left that never ended, and words on requests, go by their age.
        store.create("files/file-" + retained.id[5:14] + "0" * 16 + "/content", b"x")
        assert RetentionSweep(harness.world).run().objects[RemovedKind.FILE] == 0
        harness.clock.ahead = timedelta(days=31).total_seconds()
        found = RetentionSweep(harness.world, RetentionSettings()).run()
        assert (found.objects[RemovedKind.FILE] >= 1, found.objects[RemovedKind.TICKET]) == (True, 1)
        assert list(store.list(f"files/{retained.id}/content"))
