"""The contract of object stores, and S3's own, on two real servers."""

from __future__ import annotations

import random

import pytest

from pipeline.ports import ObjectStore
from tests.pipeline.contracts.s3_store_contract import S3StoreContract
from tests.servers.moto import MotoServer
from tests.servers.seaweedfs import SeaweedServer

pytestmark = pytest.mark.slow


class TestS3StoreOnMoto(S3StoreContract):
    @pytest.fixture
    def server(self, s3_server: MotoServer) -> MotoServer:
        return s3_server


@pytest.mark.exhaustive
class TestS3StoreOnSeaweed(S3StoreContract):
    """Slow, because writers that race wait whole seconds there."""

    @pytest.fixture
    def server(self, durable_s3_server: SeaweedServer) -> SeaweedServer:
        return durable_s3_server

    # All in one folder, as those that the gateway's listings go on behind: "a" would skip the whole folder "a/" there.
    continued_keys = ("a-b", "a.json", "a0", "ab", "b-é", "bz")
    starts = ("", "a", "a-", "ab", "b-é", "c")

    def test_lists_in_key_order_by_any_prefix(self, store: ObjectStore) -> None:
        """SeaweedFS lists folder by folder: "a/1" before "a-b" and "a.json", which S3 does not. No two keys that a root
        is made of meet so; in a folder, and between folders of other names, the order is S3's."""
        keys = ["a-b", "a.json", "a/1", "a/10", "a/2/x", "a0", "b/é", "b/z", "ab/c"]
        for key in random.Random(1).sample(keys, len(keys)):
            store.create(key, key.encode())
        for prefix in ("", "a", "a/", "a/1", "b/", "zz", "a/2/", "ab"):
            found = [info.key for info in store.list(prefix)]
            assert sorted(found) == sorted(key for key in keys if key.startswith(prefix)), prefix
            plain = [key for key in found if key not in ("a-b", "a.json")]
            assert plain == sorted(plain), prefix
