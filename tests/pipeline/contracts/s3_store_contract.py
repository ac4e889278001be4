"""The further contract of stores in S3, where network, pages and multipart uploads can break them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.adapters.s3.store import S3Store
from pipeline.ports import ObjectInfo, StoreError
from tests.pipeline.contracts.store_contract import SharedStoreContract
from tests.pipeline.s3_stores import open_s3
from tests.servers.faulty_http import FaultyHttp
from tests.servers.s3 import S3Server

MakeS3Store = Callable[..., S3Store]
MEGABYTE = 1 << 20
IN_PARTS = {"multipart_bytes": 5 * MEGABYTE, "part_bytes": 5 * MEGABYTE}


class S3StoreContract(SharedStoreContract):
    """Given a fixture `server`, then this holds on it."""

    @pytest.fixture
    def bucket(self, server: S3Server) -> str:
        return server.ensure_bucket("contract")

    @pytest.fixture
    def make_store(self, server: S3Server, bucket: str, unique_name: Callable[[], str], tmp_path: Path) -> MakeS3Store:
        prefix = f"root/{unique_name()}"

        def make_store(**more: object) -> S3Store:
            return open_s3(server, bucket, prefix, tmp_path / "scratch", **more)

        return make_store

    @pytest.fixture
    def proxy(self, server: S3Server) -> Iterator[FaultyHttp]:
        with FaultyHttp(server.endpoint) as proxy:
            yield proxy

    @pytest.fixture
    def large(self, tmp_path: Path) -> Path:
        """A file of three parts, the last of them short."""
        path = tmp_path / "large"
        path.write_bytes(b"".join(bytes([byte]) * (5 * MEGABYTE) for byte in b"ab") + b"the end")
        return path

    def test_of_64_writers_that_race_for_a_key_one_wins(self, make_store: MakeS3Store) -> None:
        stores = [make_store(connections=16) for _ in range(4)]
        barrier = threading.Barrier(64)

        def run(me: int) -> bool:
            barrier.wait()
            return stores[me % 4].create("race", b"%02d" % me)

        with ThreadPoolExecutor(64) as pool:
            outcomes = list(pool.map(run, range(64)))
        winners = [me for me, won in enumerate(outcomes) if won]
        assert len(winners) == 1
        assert stores[0].read("race") == b"%02d" % winners[0]

    def test_given_answers_that_get_lost_when_writers_race_then_one_knows_that_it_has_won(
        self, make_store: MakeS3Store, proxy: FaultyHttp
    ) -> None:
        stores = [make_store(endpoint=proxy.endpoint) for _ in range(4)]
        proxy.add("lost", method="PUT", chance=0.5)
        for race in range(4):
            with ThreadPoolExecutor(8) as pool:
                outcomes = list(pool.map(lambda me: stores[me % 4].create(f"race/{race}", b"%d" % me), range(8)))  # noqa: B023
            winners = [me for me, won in enumerate(outcomes) if won]
            assert len(winners) == 1
            assert stores[0].read(f"race/{race}") == b"%d" % winners[0]
        assert any(seen.outcome == "lost" for seen in proxy.seen)

    def test_given_a_write_whose_writer_did_not_wait_for_the_answer_then_the_writer_has_won_all_the_same(
        self, make_store: MakeS3Store, proxy: FaultyHttp
    ) -> None:
        store = make_store(endpoint=proxy.endpoint, read_seconds=0.4)
        for kind in ("late", "slow"):
            fault = proxy.add(kind, method="PUT", seconds=1.0, times=1)
            assert store.create(kind, b"mine") is True
            assert (store.read(kind), fault.hits) == (b"mine", 1)
            assert store.create(kind, b"other") is False

    def test_given_a_server_that_is_busy_for_a_while_then_every_call_gets_through(
        self, make_store: MakeS3Store, proxy: FaultyHttp
    ) -> None:
        store = make_store(endpoint=proxy.endpoint)
        assert store.create("there", b"1" * 1000) is True
        for call, expected, failures in (
            (lambda: store.create("key", b"1"), True, 4),  # more than botocore's own tries
            (lambda: store.read("there"), b"1" * 1000, 4),
            (lambda: store.info("there"), ObjectInfo("there", 1000), 1),
            (lambda: list(store.list("th")), [ObjectInfo("there", 1000)], 1),
            (lambda: store.replace("cache", b""), None, 1),
            (lambda: store.delete("key"), None, 1),
        ):
            broken = proxy.add("status", status=500, code="InternalError", times=1)
            busy = proxy.add("status", status=503, times=failures - 1)
            assert call() == expected
            assert (broken.hits, busy.hits) == (1, failures - 1)
        assert store.info("key") is None

    def test_given_answers_that_break_off_then_the_bytes_are_whole(
        self, make_store: MakeS3Store, proxy: FaultyHttp
    ) -> None:
        store = make_store(endpoint=proxy.endpoint, read_bytes=10_000)
        body = bytes(range(256)) * 200
        store.create("key", body)
        cut = proxy.add("cut", method="GET", times=2)
        assert store.read("key") == body
        assert cut.hits == 2
        cut = proxy.add("cut", method="GET", chance=0.3)
        with store.open("key") as stream:
            assert b"".join(iter(lambda: stream.read(7_001), b"")) == body
        assert cut.hits > 0

    def test_lists_more_keys_than_a_page_holds(self, make_store: MakeS3Store) -> None:
        store = make_store()
        keys = [f"many/{number:04d}/{number % 3}" for number in range(1_100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.replace(key, b"x"), keys))
        assert list(store.list("many/")) == [ObjectInfo(key, 1) for key in keys]
        assert list(store.folders("many/")) == [key[:10] for key in keys]
        assert next(store.list("many/")) == ObjectInfo(keys[0], 1)

    def test_a_large_file_becomes_one_object_in_parts(
        self, make_store: MakeS3Store, large: Path, server: S3Server
    ) -> None:
        store, body = make_store(**IN_PARTS), large.read_bytes()
        copy = large.with_name("copy")
        copy.write_bytes(b"z" * len(body))

        assert store.create("large", large) is True
        assert store.create("large", copy) is False

        assert store.info("large") == ObjectInfo("large", len(body))
        assert store.read("large") == body
        assert not large.exists()
        assert not copy.exists()
        assert unfinished(server, store) == []

    def test_of_writers_that_race_with_large_files_one_wins(
        self, make_store: MakeS3Store, large: Path, server: S3Server
    ) -> None:
        stores = [make_store(**IN_PARTS) for _ in range(3)]
        files = [large.with_name(f"large-{me}") for me in range(3)]
        for me, path in enumerate(files):
            path.write_bytes(b"%d" % me * (6 * MEGABYTE))
        with ThreadPoolExecutor(3) as pool:
            outcomes = list(pool.map(lambda me: stores[me].create("race", files[me]), range(3)))
        winners = [me for me, won in enumerate(outcomes) if won]
        assert len(winners) == 1
        assert stores[0].read("race") == b"%d" % winners[0] * (6 * MEGABYTE)
        assert unfinished(server, stores[0]) == []

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    def test_given_lost_answers_when_a_large_file_is_sent_then_its_writer_knows_that_it_has_won(
        self, make_store: MakeS3Store, proxy: FaultyHttp, large: Path, method: str
    ) -> None:
        store, body = make_store(endpoint=proxy.endpoint, **IN_PARTS), large.read_bytes()
        store.create("first", _copy(large, "first"))  # probes the server
        lost = proxy.add("lost", method=method, path="uploadId=", times=1)
        assert store.create("large", large) is True
        assert lost.hits == 1
        assert store.read("large") == body

    def test_given_a_large_file_that_cannot_be_sent_then_nothing_is_left_of_it(
        self, make_store: MakeS3Store, proxy: FaultyHttp, large: Path, server: S3Server
    ) -> None:
        store = make_store(endpoint=proxy.endpoint, **IN_PARTS)
        denied = proxy.add("status", method="PUT", path="partNumber=2", status=403, code="AccessDenied")
        with pytest.raises(StoreError, match=r"large: can't send part 2 of it: access is denied"):
            store.create("large", large)
        assert denied.hits == 1
        assert store.info("large") is None
        assert unfinished(server, store) == []
        assert not large.exists()


def _copy(path: Path, name: str) -> Path:
    copy = path.with_name(name)
    copy.write_bytes(path.read_bytes())
    return copy


def unfinished(server: S3Server, store: S3Store) -> list[str]:
    """Keys of uploads that were neither completed nor aborted."""
    answer = server.client().list_multipart_uploads(Bucket=store.bucket, Prefix=store.prefix)
    return [upload["Key"] for upload in answer.get("Uploads", [])]
