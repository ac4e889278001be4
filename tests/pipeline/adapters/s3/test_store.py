"""A bucket as an object store: what only S3 can do wrong."""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.store import S3Store
from pipeline.ports import ObjectInfo, ObjectNotFound, StoreError
from tests.pipeline.contracts.s3_store_contract import IN_PARTS, MEGABYTE, unfinished
from tests.pipeline.s3_stores import open_s3, settings_for
from tests.servers.faulty_http import FaultyHttp
from tests.servers.moto import MotoServer
from tests.servers.seaweedfs import SeaweedServer


@pytest.mark.slow
def test_keys_lie_below_the_prefix_and_are_named_by_their_url(
    s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    settings = settings_for(s3_server, tmp_path)
    store = S3Store.from_url(f"s3://{bucket}/a/b/", settings)
    store.create("jobs/1/job.json", b"{}")

    assert [found["Key"] for found in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]] == [
        "a/b/jobs/1/job.json"
    ]
    assert store.locate("jobs/1/job.json") == f"s3://{bucket}/a/b/jobs/1/job.json"
    assert store.locate("") == f"s3://{bucket}/a/b/"
    whole = S3Store.from_url(f"s3://{bucket}", settings)
    assert whole.read("a/b/jobs/1/job.json") == b"{}"
    assert list(whole.folders("")) == ["a/"]


def test_foreign_things_in_the_bucket_are_not_objects(s3_server: MotoServer, bucket: str, tmp_path: Path) -> None:
    for key in ("root/folder/", "root/.hidden", "root/a//b", "root/.tmp/probe-1", "root/good", "rootless"):
        s3_server.client().put_object(Bucket=bucket, Key=key, Body=b"1")
    store = open_s3(s3_server, bucket, "root", tmp_path)
    assert [found.key for found in store.list("")] == ["good"]
    assert list(store.folders("")) == ["a/", "folder/"]


@pytest.mark.slow
def test_any_way_of_seeking_and_reading_gives_the_same_as_a_file(
    s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    dice = random.Random(7)
    body = dice.randbytes(50_000)
    store = open_s3(s3_server, bucket, "", tmp_path, read_bytes=3_000)
    store.create("key", body)
    with store.open("key") as stream:
        oracle = io.BytesIO(body)
        for _ in range(120):
            offset = dice.randrange(-10, 55_000)
            whence = dice.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])
            target = {os.SEEK_SET: 0, os.SEEK_CUR: oracle.tell(), os.SEEK_END: len(body)}[whence] + offset
            if target >= 0:
                assert stream.seek(offset, whence) == oracle.seek(offset, whence)
            count = dice.choice([0, 1, 10, 2_999, 3_001, 20_000, -1])
            assert stream.read(count) == oracle.read(count)
            assert stream.tell() == oracle.tell()
        with pytest.raises((ValueError, OSError)):
            stream.seek(-1)


@pytest.mark.slow
def test_given_a_server_that_answers_with_other_bytes_than_requested_then_they_are_not_taken(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    store = open_s3(s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint, read_bytes=100, retry_timeout_seconds=0.1)
    store.create("key", bytes(range(256)))
    proxy.strip.add(("GET", "range"))
    with store.open("key") as stream, pytest.raises(StoreError, match=r"key: can't read it: .*IncompleteRead"):
        stream.read(10)


@pytest.mark.slow
def test_an_object_that_is_replaced_or_deleted_while_it_is_read_is_never_a_mixture(
    s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    store = open_s3(s3_server, bucket, "", tmp_path, read_bytes=1_000)
    store.replace("key", b"a" * 5_000)
    with store.open("key") as stream:
        assert stream.read(500) == b"a" * 500
        store.replace("key", b"b" * 5_000)
        with pytest.raises(StoreError, match="key: was replaced while it was read"):
            stream.read()
    with store.open("key") as stream:
        store.delete("key")
        with pytest.raises(ObjectNotFound):
            stream.read()


@pytest.mark.parametrize(
    ("stripped", "why"),
    [
        (("PUT", "if-none-match"), "ignores If-None-Match, so two workers could commit the same part"),
        (("PUT", "x-amz-meta-tokenmill-attempt"), "loses objects' metadata"),
    ],
)
@pytest.mark.slow
def test_given_a_server_that_commits_would_not_be_safe_on_then_the_store_is_refused(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path, stripped: tuple[str, str], why: str
) -> None:
    proxy.strip.add(stripped)
    with pytest.raises(StoreError, match=f"{why}.*; use a server that supports conditional writes"):
        open_s3(s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint)
    assert "Contents" not in s3_server.client().list_objects_v2(Bucket=bucket)


def test_given_a_server_that_ignores_the_condition_for_uploads_in_parts_then_the_first_large_file_is_refused(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path
) -> None:
    proxy.strip.add(("POST", "if-none-match"))
    store = open_s3(s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint, **IN_PARTS)
    large = tmp_path / "large"
    large.write_bytes(b"x" * (6 * MEGABYTE))
    with pytest.raises(StoreError, match="ignores If-None-Match when an upload in parts is completed"):
        store.create("large", large)
    assert store.info("large") is None


@pytest.mark.parametrize("found", [None, "other"])
@pytest.mark.slow
def test_given_a_conflict_of_writers_then_the_write_is_repeated_until_an_object_stands(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path, found: str | None
) -> None:
    store = open_s3(s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint, **IN_PARTS)
    if found:
        store.create("key", b"other")
        store.create("large", b"other")
    conflict = proxy.add("status", method="PUT", status=409, code="ConditionalRequestConflict", times=2)
    assert store.create("key", b"mine") is (found is None)
    assert conflict.hits == 2
    path = tmp_path / "large-file"
    path.write_bytes(b"x" * (6 * MEGABYTE))
    conflict = proxy.add(
        "status", method="POST", path="large?uploadId", status=409, code="ConditionalRequestConflict", times=1
    )
    assert store.create("large", path) is (found is None)
    assert conflict.hits == 1
    # After a conflict S3 requires the whole upload again.
    assert proxy.count("POST", "large?uploads") == (2 if found is None else 1)
    assert unfinished(s3_server, store) == []


@pytest.mark.slow
def test_given_a_server_that_is_killed_in_the_middle_of_an_upload_when_it_is_back_then_the_object_is_whole(
    durable_s3_server: SeaweedServer, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    server = durable_s3_server
    bucket = server.make_bucket(unique_name())
    killed = threading.Event()
    back: list[threading.Thread] = []

    def watch(method: str, path: str) -> None:
        if method == "PUT" and "partNumber=2" in path and not killed.is_set():
            killed.set()
            server.kill()
            back.append(threading.Timer(0.5, server.start))
            back[0].start()

    body = b"a" * (5 * MEGABYTE) + b"b" * (5 * MEGABYTE) + b"c"
    large = tmp_path / "large"
    large.write_bytes(body)
    with FaultyHttp(server.endpoint) as proxy:
        store = open_s3(server, bucket, "", tmp_path, endpoint=proxy.endpoint, part_threads=1, **IN_PARTS)
        store.create("before", b"acknowledged")
        proxy.watch = watch
        assert store.create("large", large) is True
        back[0].join()
        assert store.read("large") == body
        assert store.read("before") == b"acknowledged"


@pytest.mark.slow
def test_given_a_server_that_stays_away_then_one_line_says_so_and_nothing_is_half_there(
    durable_s3_server: SeaweedServer, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    server = durable_s3_server
    bucket = server.make_bucket(unique_name())
    store = open_s3(server, bucket, "", tmp_path, retry_timeout_seconds=0.5)
    server.kill()
    with pytest.raises(StoreError) as caught:
        store.create("key", b"1")
    assert str(caught.value) == (
        f"s3://{bucket}/key: can't create it: {server.endpoint} could not be reached (EndpointConnectionError) "
        "for 0.5 s; check the endpoint and the network"
    )
    server.start()
    assert store.info("key") is None
    assert store.create("key", b"1") is True


@pytest.mark.slow
def test_uploads_whose_writers_died_are_thrown_away_when_they_are_old(
    durable_s3_server: SeaweedServer, unique_name: Callable[[], str], tmp_path: Path
) -> None:
    client, bucket = durable_s3_server.client(), durable_s3_server.make_bucket(unique_name())
    for key in ("root/large", "elsewhere/large"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    store = open_s3(durable_s3_server, bucket, "root", tmp_path)
    now = datetime.now(UTC)
    assert store.abort_stale_uploads(now - timedelta(days=1)) == 0
    assert store.abort_stale_uploads(now + timedelta(days=1)) == 1
    assert unfinished(durable_s3_server, store) == []
    assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1


@pytest.mark.parametrize(("encryption", "key"), [("AES256", None), ("aws:kms", "alias/jobs")])
@pytest.mark.slow
def test_every_write_requests_the_configured_encryption(
    proxy: FaultyHttp, s3_server: MotoServer, bucket: str, tmp_path: Path, encryption: str, key: str | None
) -> None:
    store = open_s3(
        s3_server, bucket, "", tmp_path, endpoint=proxy.endpoint, encryption=encryption, kms_key=key, **IN_PARTS
    )
    large = tmp_path / "large"
    large.write_bytes(b"x" * (6 * MEGABYTE))
    assert store.create("small", b"1")
    assert store.create("large", large)
    store.replace("cache", b"1")
    for name in ("small", "large", "cache"):
        assert s3_server.client().head_object(Bucket=bucket, Key=name)["ServerSideEncryption"] == encryption
    writes = [
        {name.lower(): value for name, value in seen.headers.items()}
        for seen in proxy.seen
        if (seen.method == "PUT" and "uploadId" not in seen.path) or seen.path.endswith("?uploads")
    ]
    assert len(writes) >= 5
    assert {write.get("x-amz-server-side-encryption") for write in writes} == {encryption}
    assert {write.get("x-amz-server-side-encryption-aws-kms-key-id") for write in writes} == {key}


def test_scratch_is_private_local_and_gone_with_the_store(s3_server: MotoServer, bucket: str, tmp_path: Path) -> None:
    with open_s3(s3_server, bucket, "", tmp_path / "scratch") as store:
        built = store.scratch / "part"
        built.write_bytes(b"1")
        assert store.create("part", built) is True
        assert not built.exists()
        scratch = store.scratch
        assert scratch.is_relative_to(tmp_path / "scratch")
    assert not scratch.exists()
    with pytest.raises(StoreError, match="is closed"):
        store.create("key", b"1")


@pytest.mark.slow
def test_a_store_for_reading_writes_nothing(s3_server: MotoServer, bucket: str, tmp_path: Path) -> None:
    open_s3(s3_server, bucket, "", tmp_path).create("key", b"1")
    connection = S3Connection(settings_for(s3_server, tmp_path / "none"))
    store = S3Store(bucket, "", connection, read_only=True)
    assert list(store.list("")) == [ObjectInfo("key", 1)]
    for write in (lambda: store.create("k", b""), lambda: store.replace("k", b""), lambda: store.delete("key")):
        with pytest.raises(StoreError, match="for reading only"):
            write()
    assert store.read("key") == b"1"
    assert not (tmp_path / "none").exists()
