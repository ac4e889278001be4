"""The contract of object stores. An adapter's test module subclasses `StoreContract` and gives a `make_store`
fixture: a function without arguments that opens one more store on the same, initially empty, root. A store that several
processes can share subclasses `SharedStoreContract`."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.ports import ObjectInfo, ObjectNotFound, ObjectStore, StoreError

MakeStore = Callable[[], ObjectStore]
BAD_KEYS = [
    "",
    "/abs",
    "a//b",
    "a/",
    "../up",
    "a/../b",
    "./a",
    ".hidden",
    "a/.tmp/b",
    "a\0b",
    "a\nb",
    "a\\b",
    "x" * 256,
]
MEGABYTE = 1 << 20


def create_at_signal(make_store: MakeStore, start: Any, mine: bytes, outcomes: Any) -> None:
    store = make_store()
    start.wait()
    outcomes.put((mine[:1], store.create("race", mine)))


def create_for_ever(make_store: MakeStore, folder: str) -> None:
    store = make_store()
    for number in range(1_000_000):
        store.create(f"{folder}/{number:06d}", bytes([number % 256]) * MEGABYTE)


class StoreContract:
    """Given any adapter of the port, then this holds."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> ObjectStore:
        return make_store()

    def test_what_was_created_can_be_read_back(self, store: ObjectStore) -> None:
        assert store.create("a/b/c.bin", b"hello") is True
        assert store.read("a/b/c.bin") == b"hello"
        assert store.info("a/b/c.bin") == ObjectInfo("a/b/c.bin", 5)
        with store.open("a/b/c.bin") as stream:
            stream.seek(-3, os.SEEK_END)
            assert stream.read() == b"llo"

    def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        assert store.create("empty", b"") is True
        assert store.read("empty") == b""

    def test_the_second_creation_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        assert store.create("key", b"first") is True
        assert store.create("key", b"second, and longer") is False
        assert store.read("key") == b"first"

    def test_another_store_on_the_same_root_sees_the_same(self, make_store: MakeStore) -> None:
        one, two = make_store(), make_store()
        assert one.create("key", b"one") is True
        assert two.read("key") == b"one"
        assert two.create("key", b"two") is False

    def test_a_file_given_away_becomes_the_object_and_is_gone(self, store: ObjectStore, tmp_path: Path) -> None:
        for name, expected in (("first", True), ("second", False)):
            source = tmp_path / name
            source.write_bytes(name.encode())
            assert store.create("from/file", source) is expected
            assert not source.exists()
        assert store.read("from/file") == b"first"

    def test_missing_objects_are_said_to_be_missing(self, store: ObjectStore) -> None:
        assert store.info("nothing/here") is None
        with pytest.raises(ObjectNotFound):
            store.read("nothing/here")
        with pytest.raises(ObjectNotFound):
            store.open("nothing/here")
        store.delete("nothing/here")
        assert list(store.list("nothing/")) == []

    def test_a_key_below_an_object_is_missing(self, store: ObjectStore) -> None:
        store.create("object", b"1")
        assert store.info("object/below") is None
        with pytest.raises(ObjectNotFound):
            store.read("object/below")

    def test_lists_in_key_order_by_any_prefix(self, store: ObjectStore) -> None:
        keys = ["a-b", "a.json", "a/1", "a/10", "a/2/x", "a0", "b/é", "b/z", "ab/c"]
        for key in random.Random(1).sample(keys, len(keys)):
            store.create(key, key.encode())
        for prefix in ("", "a", "a/", "a/1", "b/", "zz", "a/2/", "ab"):
            expected = [ObjectInfo(key, len(key.encode())) for key in sorted(keys) if key.startswith(prefix)]
            assert list(store.list(prefix)) == expected, prefix

    continued_keys = ("a-b", "a.json", "a/1", "a/10", "a/2/x", "a/2/y", "a0", "b/é", "b/z", "ab/c")
    starts = ("", "a", "a/", "a/1", "a/15", "a/2", "a/2/", "a/2/x", "a/2/z", "a-", "ab", "b/é", "c")

    def test_a_listing_goes_on_behind_any_key(self, store: ObjectStore) -> None:
        keys = self.continued_keys
        for key in keys:
            store.create(key, key.encode())
        for prefix in ("", "a", "a/", "b/"):
            for after in self.starts:
                expected = [key for key in sorted(keys) if key.startswith(prefix) and key > after]
                assert [info.key for info in store.list(prefix, after)] == expected, (prefix, after)

    def test_folders_are_named_without_a_visit(self, store: ObjectStore) -> None:
        for key in ("jobs/b/job.json", "jobs/a/job.json", "jobs/a/x/y", "jobs/file", "other/c/d"):
            store.create(key, b"")
        assert list(store.folders("jobs/")) == ["jobs/a/", "jobs/b/"]
        assert list(store.folders("")) == ["jobs/", "other/"]
        assert list(store.folders("nothing/")) == []

    def test_a_deleted_object_can_be_created_again(self, store: ObjectStore) -> None:
        store.create("key", b"1")
        store.delete("key")
        assert store.info("key") is None
        assert store.create("key", b"2") is True

    def test_replace_creates_and_overwrites(self, store: ObjectStore) -> None:
        store.replace("progress.json", b"1")
        store.replace("progress.json", b"22")
        assert store.read("progress.json") == b"22"

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_a_bad_key_is_refused_by_every_method(self, store: ObjectStore, key: str) -> None:
        for attempt in (
            lambda: store.create(key, b""),
            lambda: store.read(key),
            lambda: store.open(key),
            lambda: store.info(key),
            lambda: store.delete(key),
            lambda: store.replace(key, b""),
        ):
            with pytest.raises(StoreError):
                attempt()

    def test_of_many_threads_that_race_for_a_key_one_wins(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(4)]
        for race in range(25):
            barrier, outcomes = threading.Barrier(8), dict.fromkeys(range(8), False)

            def run(me: int, race: int = race, barrier: Any = barrier, outcomes: Any = outcomes) -> None:
                barrier.wait()
                outcomes[me] = stores[me % 4].create(f"race/{race}", bytes([me]) * (me * 1000 + 1))

            threads = [threading.Thread(target=run, args=(me,)) for me in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            winners = [me for me, won in outcomes.items() if won]
            assert len(winners) == 1
            assert stores[0].read(f"race/{race}") == bytes([winners[0]]) * (winners[0] * 1000 + 1)


class SharedStoreContract(StoreContract):
    """The further contract of a store that several processes share."""

    def test_of_two_processes_that_race_for_a_key_one_wins(self, make_store: MakeStore) -> None:
        context = multiprocessing.get_context("fork")
        for _ in range(5):
            start, outcomes = context.Barrier(2), context.SimpleQueue()
            bodies = [b"a" * MEGABYTE, b"b" * MEGABYTE]
            racers = [
                context.Process(target=create_at_signal, args=(make_store, start, body, outcomes)) for body in bodies
            ]
            for racer in racers:
                racer.start()
            results = [outcomes.get() for _ in racers]
            for racer in racers:
                racer.join()
            winners = [byte for byte, won in results if won]
            assert len(winners) == 1
            store = make_store()
            assert store.read("race") == winners[0] * MEGABYTE
            store.delete("race")

    def test_a_killed_writer_never_leaves_a_torn_object(self, make_store: MakeStore) -> None:
        context = multiprocessing.get_context("fork")
        store, seen = make_store(), 0
        for life in range(6):
            writer = context.Process(target=create_for_ever, args=(make_store, f"life{life}"))
            writer.start()
            while store.info(f"life{life}/000002") is None:
                time.sleep(0.002)
            time.sleep(random.Random(life).random() * 0.02)
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            for found in store.list(f"life{life}/"):
                body = store.read(found.key)
                assert body == bytes([int(found.key[-6:]) % 256]) * MEGABYTE
                seen += 1
                store.delete(found.key)
        assert seen >= 18
