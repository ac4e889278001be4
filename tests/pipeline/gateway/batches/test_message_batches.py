"""Creation of message batches: errors, repetitions, and crashes midway leave one whole batch or none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from pipeline.gateway.batches.finalizer import Finalizer
from pipeline.gateway.batches.messages import MAX_REQUESTS, MessageBatchBody, MessageBatches
from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.body_reading import parse_object
from pipeline.gateway.http.errors import ApiError
from pipeline.gateway.http.pagination import PageRequest
from pipeline.gateway.limits.admission import RateSettings
from pipeline.gateway.limits.storage_quota import StorageQuota
from pipeline.ingest.intake import Intake
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import StoreUnavailable, World
from schemas.models import CatalogEntry
from schemas.requests.limits import RateLimits
from tests.pipeline.dying_store import Killed, WatchedStore, dies_at, lets_in
from tests.pipeline.gateway.http_harness import run_http_harness
from tests.pipeline.made_jobs import PIN
from tests.pipeline.simulation import simulated_world

URL = "/v1/messages/batches"
PARAMS = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
ONE = {"requests": [{"custom_id": "a", "params": PARAMS}]}


def left(http: httpx2.Client) -> list[Any]:
    """The files and batches that are there."""
    return [*http.get("/v1/files").json()["data"], *http.get(URL).json()["data"]]


def test_errors_name_the_field_as_a_path(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:

        def refusal(body: dict[str, Any]) -> str:
            response = http.post(URL, json=body)
            assert response.status_code == 400
            message: str = response.json()["error"]["message"]
            return message

        assert refusal({}) == "requests is missing; add it"
        assert refusal({"requests": []}) == "requests is empty; give at least one"
        assert refusal({"requests": [{"custom_id": "a"}]}) == "requests[0].params is missing; add it"
        assert refusal({"requests": [{**ONE["requests"][0], "custom_id": 5}]}) == (
            "requests[0].custom_id is 5, but must be a string"
        )
        assert refusal({**ONE, "requestz": 1}) == "requestz is not a parameter known here; remove it"
        assert left(http) == []


@pytest.mark.slow
def test_a_failed_submission_leaves_nothing_and_a_later_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any) -> None:
        raise StoreUnavailable("the store is away")

    with run_http_harness(tmp_path) as harness, harness.http() as http:
        with monkeypatch.context() as broken:
            broken.setattr(Intake, "accept", unavailable)
            assert http.post(URL, json=ONE).status_code >= 500
        assert left(http) == []
        made = http.post(URL, json=ONE).json()["id"]
        assert [one["id"] for one in http.get(URL).json()["data"]] == [made]


@pytest.mark.slow
def test_a_repeated_idempotent_request_gives_the_same_batch(tmp_path: Path) -> None:
    once, limits = {"Idempotency-Key": "once"}, RateLimits(running_jobs=2)
    with run_http_harness(tmp_path, permits=0, rates=RateSettings(tenant=limits)) as harness, harness.http() as http:
        made: list[str] = []
        barrier = threading.Barrier(4)

        def create() -> None:
            barrier.wait()
            made.append(http.post(URL, json=ONE, headers=once).json()["id"])

        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), len(set(made))) == (4, 1)
        assert len(left(http)) == 2, "a batch and its file"
        changed = http.post(URL, json={**ONE, "tokenmill": {"tier": "bulk"}}, headers=once)
        assert (changed.status_code, changed.json()["error"]["details"]["error_code"]) == (
            409,
            "idempotency_key_reused",
        )
        other = http.post(URL, json=ONE, headers={"Idempotency-Key": "other"}).json()["id"]
        assert other != made[0]
        assert http.post(URL, json=ONE).status_code == 429, "a new batch is refused by the limit, not a repetition"
        assert http.post(URL, json=ONE, headers=once).json()["id"] == made[0]
        assert len(left(http)) == 4


@pytest.mark.slow
def test_a_batch_that_openais_api_created_is_listed_as_well(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": PARAMS}
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        file = harness.client().files.create(file=("a.jsonl", orjson.dumps(line)), purpose="batch")
        order: Any = {"input_file_id": file.id, "endpoint": "/v1/messages", "completion_window": "24h"}
        made = harness.client().batches.create(**order).id
        harness.client().batches.create(**order | {"endpoint": "/v1/chat/completions"})
        assert [one["id"] for one in http.get(URL).json()["data"]] == [made]


def gateway(world: World) -> MessageBatches:
    executor = ThreadPoolExecutor(1)
    files = Files(world, executor)
    return MessageBatches(world, files, Batches(world, Intake(world), files, Finalizer(world, files), executor))


def served_world(folder: Path) -> World:
    world = simulated_world(folder)
    Catalog(world.store).publish(CatalogEntry(pin=PIN, max_model_len=2_048, published_at=world.clock.now()))
    return world


def create(world: World, key: str | None = "once") -> str:
    return gateway(world).create("acme", ONE, StorageQuota(), key).id


def check_batches(world: World, most: int) -> None:
    """The batches are those that are listed, and their files are there."""
    jobs = [folder.split("/")[1] for folder in world.store.folders(JOBS)]
    batches = [name for name in jobs if JobLedger(world.store, f"{JOBS}{name}/").find_job() is not None]
    assert [one.id for one in gateway(world).page("acme", 10, None, None).data] == batches
    assert len(batches) <= most
    for name in batches:
        uri = JobLedger(world.store, f"{JOBS}{name}/").job().input.uri
        assert world.store.info(uri.removeprefix("memory:")) is not None


@pytest.mark.parametrize("key", [None, "once"])
def test_a_batch_whose_creation_is_killed_is_listed_or_does_not_exist(tmp_path: Path, key: str | None) -> None:
    for nth in range(1, 100):
        world = served_world(tmp_path)
        watched = WatchedStore(world.store, dies_at(nth))
        with suppress(Killed):
            create(replace(world, store=watched), key)
        check_batches(world, 1)
        create(world, key)
        check_batches(world, 2 if key is None else 1)
        if len(watched.calls) < nth:
            return
    raise AssertionError("it never ends")


def test_a_repetition_at_any_moment_of_the_first_request_finds_its_batch(tmp_path: Path) -> None:
    for nth in range(1, 100):
        world, made = served_world(tmp_path), list[str]()
        watched = WatchedStore(world.store, lets_in(nth, lambda: made.append(create(world))))  # noqa: B023
        made.append(create(replace(world, store=watched)))
        check_batches(world, 1)
        assert len(set(made)) == 1
        assert len(list(Files(world, ThreadPoolExecutor(1)).page("acme", PageRequest(10, None)).data)) == 1
        if len(made) == 1:
            return
    raise AssertionError("it never ends")


def test_as_many_requests_as_a_body_may_have_fit_into_one() -> None:
    def body(count: int) -> bytes:
        return orjson.dumps({"requests": [{"custom_id": str(at), "params": PARAMS} for at in range(count)]})

    assert len(MessageBatchBody.model_validate(parse_object(body(MAX_REQUESTS), 64)).requests) == MAX_REQUESTS
    with pytest.raises(ApiError, match="the body holds more than"):
        parse_object(body(MAX_REQUESTS + 100), 64)
