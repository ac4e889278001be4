"""Compressed responses over real connections: what a client asks for, and never what must leave at once."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import httpx2
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from pipeline.gateway.http.compression import MIN_BYTES, choose_coding, compressed
from tests.pipeline.gateway.batches.test_batches import begin, wait
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness

ROWS = 40
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpHarness]:
    with run_http_harness(tmp_path_factory.mktemp("harness")) as harness:
        yield harness


@pytest.fixture(scope="module")
def output(harness: HttpHarness) -> str:
    """The path of a batch's output file."""
    client = harness.client()
    done = wait(client, begin(client, lines(ROWS)).id)
    return f"/v1/files/{done.output_file_id}/content"


def unpacked(data: bytes, coding: str) -> bytes:
    whole: bytes = pa.CompressedInputStream(pa.BufferReader(data), coding).read()
    return whole


def fetch(harness: HttpHarness, path: str, accept: str, method: str = "GET", **headers: str) -> Any:
    """The response, and its bytes as they were sent."""
    with harness.http() as http, http.stream(method, path, headers={"Accept-Encoding": accept, **headers}) as response:
        return response, b"".join(response.iter_raw())


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("path", ["/openapi.json", "/v1/files"])
@pytest.mark.slow
def test_large_json_is_compressed_when_it_is_asked_for(
    harness: HttpHarness, output: str, path: str, coding: str
) -> None:
    for _ in range(8):
        harness.client().files.create(file=("a.jsonl", lines(1)), purpose="batch")
    plain, expected = fetch(harness, path, "identity")
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == "Accept-Encoding"
    response, data = fetch(harness, path, f"br, {coding}")
    assert response.headers["content-encoding"] == coding
    assert response.headers["vary"] == "Accept-Encoding"
    assert int(response.headers["content-length"]) == len(data) < len(expected)
    assert unpacked(data, coding) == expected


@pytest.mark.slow
def test_a_client_that_knows_nothing_of_this_reads_compressed_responses(harness: HttpHarness, output: str) -> None:
    encodings = []
    hooks = {"response": [lambda response: encodings.append(response.headers.get("content-encoding"))]}
    with httpx2.Client(base_url=harness.url, event_hooks=hooks) as http:
        assert len(http.get("/v1/batches").json()["data"]) == 1
        assert http.get("/openapi.json").json()["openapi"]
        assert len(http.get(output).content.splitlines()) == ROWS * 4 // 5, "every fifth fails"
    assert encodings == ["gzip"] * 3


def test_small_json_and_errors_stay_as_they_are(harness: HttpHarness) -> None:
    for path in ("/healthz", "/v1/files/file-00000000000000000", "/nowhere"):
        response, data = fetch(harness, path, "gzip, zstd")
        assert "content-encoding" not in response.headers
        assert len(data) < MIN_BYTES
        assert response.headers["content-length"] == str(len(data))


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_results_are_downloaded_compressed(harness: HttpHarness, output: str, coding: str) -> None:
    plain, content = fetch(harness, output, "identity")
    assert (plain.headers["vary"], plain.headers["accept-ranges"]) == ("Accept-Encoding", "bytes")
    assert plain.headers["content-length"] == str(len(content))
    tag = plain.headers["etag"]

    response, data = fetch(harness, output, coding)
    assert response.headers["content-encoding"] == coding
    assert response.headers["etag"] == f"W/{tag}", "other bytes, so no strong one"
    assert "content-length" not in response.headers
    assert "accept-ranges" not in response.headers
    assert len(data) < len(content)
    assert unpacked(data, coding) == content

    for known in (tag, f"W/{tag}"):
        same, nothing = fetch(harness, output, coding, **{"If-None-Match": known})
        assert (same.status_code, nothing, same.headers["vary"]) == (304, b"", "Accept-Encoding")


def test_ranges_are_of_the_file_itself(harness: HttpHarness, output: str) -> None:
    plain, content = fetch(harness, output, "identity")
    part, data = fetch(harness, output, "gzip, zstd", Range="bytes=10-2000")
    assert (part.status_code, data) == (206, content[10:2001])
    assert "content-encoding" not in part.headers
    assert part.headers["etag"] == plain.headers["etag"]
    whole, data = fetch(harness, output, "gzip", **{"Range": "bytes=10-20", "If-Range": f"W/{plain.headers['etag']}"})
    assert (whole.status_code, data) == (200, content), "a part must not be joined to a compressed download"


def test_uploads_are_downloaded_as_they_were_sent(harness: HttpHarness) -> None:
    packed = gzip.compress(lines(50))
    file = harness.client().files.create(file=("a.jsonl.gz", packed), purpose="batch")
    response, data = fetch(harness, f"/v1/files/{file.id}/content", "gzip, zstd")
    assert (data, response.headers.get("content-encoding")) == (packed, None)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_committed_results_are_streamed_compressed(harness: HttpHarness, output: str, coding: str) -> None:
    batch = harness.client().batches.list().data[0].id
    plain, content = fetch(harness, f"/v1/batches/{batch}/results", "identity")
    response, data = fetch(harness, f"/v1/batches/{batch}/results", coding)
    assert (plain.headers["vary"], response.headers["content-encoding"]) == ("Accept-Encoding", coding)
    assert len(unpacked(data, coding).splitlines()) == ROWS
    assert sorted(unpacked(data, coding).splitlines()) == sorted(content.splitlines())


def test_events_are_never_compressed(harness: HttpHarness) -> None:
    with (
        harness.http() as http,
        http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Accept-Encoding": "gzip, zstd"}
        ) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in response.headers
        assert b"".join(response.iter_raw()).endswith(b"data: [DONE]\n\n")


def test_a_head_request_is_answered_without_a_coding(harness: HttpHarness, output: str) -> None:
    response, data = fetch(harness, output, "gzip, zstd", "HEAD")
    assert "content-encoding" not in response.headers
    assert data == b""


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip, deflate", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("zstd;q=0.5, gzip;q=0.8", "gzip"),
        ("GZIP", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000, identity", None),
        ("identity, gzip;q=0.5", None),
        ("*", "zstd"),
        ("*;q=0.1, zstd;q=0", "gzip"),
        ("x-gzip, br", None),
        ("gzip;q=nan, zstd;q=inf", None),
        ("gzip;q=2, zstd;level=9", None),
        (";;,=,gzip;q", None),
        ("", None),
    ],
)
def test_the_coding_is_the_one_with_the_largest_weight(accept: str, coding: str | None) -> None:
    assert choose_coding(Headers({"accept-encoding": accept})) == coding


@given(st.lists(st.binary(max_size=5_000), max_size=8), st.sampled_from(["gzip", "zstd"]))
@pytest.mark.slow
def test_any_chunks_are_one_compressed_stream(chunks: list[bytes], coding: Any) -> None:
    packed = b"".join(compressed(chunks, coding))
    assert unpacked(packed, coding) == b"".join(chunks)
    assert coding != "gzip" or gzip.decompress(packed) == b"".join(chunks)


@given(st.text(st.characters(codec="ascii"), max_size=60))
@pytest.mark.slow
def test_any_header_is_understood_or_ignored(accept: str) -> None:
    assert choose_coding(Headers(raw=[(b"accept-encoding", accept.encode())])) in (None, "gzip", "zstd")
