"""API keys: authentication, scopes, expiry and revocation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from websockets.exceptions import InvalidStatus

from pipeline.gateway.http.api_keys import ApiKeys, KeyNotFound, Scope
from pipeline.gateway.http.auth import Authority, require_scope
from pipeline.gateway.http.errors import ApiError
from pipeline.ports import ObjectInfo, World
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.pipeline.simulation import MemoryStore
from tests.waiting import HANG_SECONDS

ALL = tuple(Scope)


def test_a_key_authenticates_its_tenant_until_it_expires_or_is_revoked(world: World) -> None:
    keys, elsewhere = ApiKeys(world), ApiKeys(world, believed=5.0)
    key, text = keys.create("acme", (Scope.FILES,), expires_at=world.clock.now() + timedelta(hours=1))
    assert elsewhere.check(text) == key
    secret = text.rsplit("-", 1)[1]
    assert isinstance(world.store, MemoryStore)
    assert not any(secret.encode() in data for data in world.store.objects.values()), "the secret is stored"
    keys.revoke(key.id)
    assert keys.check(text) is None
    assert elsewhere.check(text) == key, "believed for some seconds"
    world.clock.sleep(5.0)
    assert elsewhere.check(text) is None
    late, text = keys.create("acme", ALL, expires_at=world.clock.now() + timedelta(hours=1))
    world.clock.sleep(3_600)
    assert keys.check(text) is None
    assert [(one.key.id, one.revoked) for one in keys.listed()] == sorted([(key.id, True), (late.id, False)])


def test_given_the_objects_of_a_key_in_another_root_then_it_is_valid_there_until_they_say_that_it_is_revoked(
    world: World,
) -> None:
    keys, elsewhere = ApiKeys(world), replace(world, store=MemoryStore())
    key, text = keys.create("acme", ALL)

    def copied() -> ApiKeys:
        for info in world.store.list("keys/"):
            elsewhere.store.create(info.key, world.store.read(info.key))
        return ApiKeys(elsewhere)

    assert copied().check(text) == key
    keys.revoke(key.id)
    assert copied().check(text) is None


@pytest.mark.parametrize(
    "text", ["", "tm-", "tm-0123456789abcdef-" + "0" * 64, "tm-../../etc/passwd-" + "0" * 64, "sk-1", "tm-" + "é" * 81]
)
def test_invalid_keys_are_refused(world: World, text: str) -> None:
    keys = ApiKeys(world)
    _, real = keys.create("acme", ALL)
    assert keys.check(text) is None
    assert keys.check(real[:-1] + ("0" if real[-1] != "0" else "1")) is None
    with pytest.raises(KeyNotFound):
        keys.revoke(text)


def test_an_installation_that_had_keys_never_becomes_open_again(world: World) -> None:
    authority = Authority(ApiKeys(world, believed=0.0))
    assert authority.caller(None).tenant == "default"
    keys = ApiKeys(world)
    key, _ = keys.create("acme", ALL)
    keys.revoke(key.id)
    with pytest.raises(ApiError) as refused:
        authority.caller(None)
    assert refused.value.status == 401
    assert Authority(keys, "off").caller(None).tenant == "default"
    with pytest.raises(ApiError):
        Authority(ApiKeys(world), "keys").caller("Bearer x")


def test_routes_require_their_scopes(world: World) -> None:
    keys = ApiKeys(world)
    authority = Authority(keys)
    for scopes, may in (((Scope.FILES,), {Scope.FILES}), ((Scope.ADMIN,), set(Scope)), ((), set())):
        _, text = keys.create("acme", scopes)
        caller = authority.caller(f"bearer {text}")
        for scope in Scope:
            if scope in may:
                require_scope(caller, scope)
            else:
                with pytest.raises(ApiError) as refused:
                    require_scope(caller, scope)
                assert refused.value.status == 403


class CountingStore(MemoryStore):
    """Counts reads and listings."""

    requests = 0

    def read(self, key: str) -> bytes:
        self.requests += 1
        return super().read(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.requests += 1
        return super().list(prefix, after)


def test_a_flood_of_invented_keys_adds_few_store_reads_and_blocks_no_valid_key(world: World) -> None:
    store = CountingStore()
    world = replace(world, store=store)
    keys = ApiKeys(world)
    old, before = keys.create("acme", ALL)[1], keys.create("acme", ALL)[1]
    assert keys.check(old) is not None
    store.requests = 0
    for number in range(20_000):
        assert keys.check(f"tm-{number:016x}-{'0' * 64}") is None
    assert store.requests <= 15
    assert keys.check(before) is not None, "one that wasn't used before"
    store.requests = 0
    assert keys.check(old) is not None
    assert not store.requests, "made-up keys put it out"
    _, new = keys.create("acme", ALL)
    world.clock.sleep(5.0)
    for number in range(100):
        keys.check(f"tm-{number + 50_000:016x}-{'0' * 64}")
    assert keys.check(new) is not None, "within seconds"


@pytest.mark.slow
def test_two_authorization_headers_are_refused(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        _, good = harness.keys.create("acme", ALL)
        for values in ((good, "bad"), ("bad", good), (good, good)):
            headers = [("Authorization", f"Bearer {value}") for value in values]
            with harness.http() as http:
                answer = http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "several_credentials")
            with (
                pytest.raises(InvalidStatus) as refused,
                connect(harness.url.replace("http", "ws") + "/v1/stream", additional_headers=headers),
            ):
                pass
            assert refused.value.response.status_code == 400


@pytest.mark.slow
def test_openais_client_reads_pages_over_http(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        _, files = harness.keys.create("acme", (Scope.FILES,))
        _, capped = harness.keys.create("acme", (Scope.INFERENCE,), max_tokens=3)
        for wrong in ("none", files[:-1]):
            with pytest.raises(openai.AuthenticationError) as refused:
                harness.client(wrong).models.list()
            assert refused.value.code == "invalid_api_key"
        uploader = harness.client(files)
        assert uploader.models.list().data
        assert uploader.files.create(file=("a.jsonl", lines(1)), purpose="batch").id
        for attempt in (uploader.batches.list, lambda: harness.client(capped).files.list()):
            with pytest.raises(openai.PermissionDeniedError):
                attempt()
        hello: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(openai.BadRequestError, match="this API key allows at most 3"):
            harness.client(capped).chat.completions.create(**hello, max_tokens=4)
        answer = harness.client(capped).chat.completions.create(**hello)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        (request,) = harness.worker.requests.values()
        assert request.tenant == "acme"
        with harness.http() as http:
            assert http.get("/v1/models").headers["www-authenticate"] == "Bearer"
            assert http.get("/healthz").status_code == 200


def test_requests_from_pages_of_other_sites_are_refused(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        for origin in ("http://evil.example", "null", "http://[", "file://"):
            answer = http.get("/v1/models", headers={"Origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "other_origin"), origin
        assert http.get("/v1/models", headers={"Origin": harness.url}).status_code == 200


@pytest.mark.parametrize("ends", ["revoked", "expired"])
@pytest.mark.slow
def test_a_websocket_refuses_requests_once_its_key_is_revoked(tmp_path: Path, ends: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    first = {"type": "request", "url": "/v1/chat/completions", "body": body | {"tokenmill": {"resume": 30}}}
    with run_http_harness(tmp_path) as harness:
        until = harness.clock.now() + timedelta(hours=1)
        key, text = harness.keys.create("acme", (Scope.INFERENCE,), expires_at=until)
        headers = {"Authorization": f"Bearer {text}"}
        with connect(harness.url.replace("http", "ws") + "/v1/stream", additional_headers=headers) as socket:

            def said(message: dict[str, Any]) -> list[dict[str, Any]]:
                socket.send(orjson.dumps(message))
                came = [orjson.loads(socket.recv(HANG_SECONDS))]
                while came[-1]["type"] not in ("done", "error"):
                    came.append(orjson.loads(socket.recv(HANG_SECONDS)))
                return came

            begun = said(first)
            assert begun[-1]["type"] == "done"
            again = {"type": "resume", "stream": begun[0]["stream"]}
            assert said(again)[-1]["type"] == "done"
            if ends == "revoked":
                harness.keys.revoke(key.id)
            else:
                harness.clock.ahead = 3_601
            for message in (first, again):
                (refused,) = said(message)
                assert refused["error"]["code"] == "invalid_api_key"
