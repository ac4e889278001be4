"""A test harness: a real gateway over a root in a folder, with a job controller and a worker that answers at once
without a model. Each response is validated against the gateway's OpenAPI document."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2
import orjson
from openai import OpenAI

from pipeline import metric_collectors
from pipeline.adapters.folder.durable import LOCAL_DISK, Disk
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.degradation import MemoryDegradationBoard
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.answers.index import AnswerIndex
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.gateway.app import make_app
from pipeline.gateway.batches.finalizer import Finalizer
from pipeline.gateway.batches.service import Batches
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.api_keys import ApiKeys
from pipeline.gateway.http.auth import AuthMode, Authority
from pipeline.gateway.http.goodput import GoodputMetrics
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.http.middleware import RequestMiddleware
from pipeline.gateway.http.server import GatewayServer, listen
from pipeline.gateway.inference.lane_bridge import LaneBridge, draining
from pipeline.gateway.inference.mirroring import Mirror
from pipeline.gateway.inference.models import ServedModels
from pipeline.gateway.inference.request_builder import InferenceRequestBuilder, InferenceSettings
from pipeline.gateway.inference.response_cache import ResponseCache
from pipeline.gateway.inference.responses import InferenceResponses, StreamSettings
from pipeline.gateway.limits.admission import RateLimiter, RateSettings
from pipeline.gateway.openapi.request_schemas import build_schemas
from pipeline.gateway.routes.dependencies import GatewayDependencies
from pipeline.gateway.status import Status
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.inputs.open import open_pinned
from pipeline.lane.client import CallSettings
from pipeline.lane.memory import MemoryLane
from pipeline.lane.ports import OpenLane
from pipeline.ledger.ledger import JobLedger
from pipeline.models.catalog import Catalog
from pipeline.models.open_releases import OpenReleases
from pipeline.observability.exposition import Metrics
from pipeline.overload.controller import OverloadController
from pipeline.overload.forecast import Promises
from pipeline.ports import World
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import Tier
from schemas.models import CatalogEntry
from schemas.settings.answers import AnswerOptions
from schemas.settings.gateway import GatewayOptions
from schemas.settings.lane import SloOptions
from schemas.settings.overload import OverloadOptions
from tests.pipeline.gateway.lane_worker import LaneWorker
from tests.pipeline.gateway.witness import Watched, Witness
from tests.pipeline.made_jobs import MODELS, PIN, computed, report
from tests.waiting import HANG_SECONDS

SCHEMAS = cache(build_schemas)
PROMISES = Promises({Tier.INTERACTIVE: 1.0})
DOCUMENTS: dict[tuple[str, str | None], dict[str, Any]] = {}
"""OpenAPI documents by a gateway's options and default model. Most of the processor time of a short test would be
spent on making one."""


class ShiftedClock(SystemClock):
    """The system clock, shifted by `ahead` seconds."""

    ahead: float = 0.0

    def now(self) -> Any:
        from datetime import timedelta  # noqa: PLC0415

        return super().now() + timedelta(seconds=self.ahead)


@dataclass
class HttpHarness:
    """A running gateway with its services, for a test.

    Attributes:
        permits: a semaphore; each commit of the worker acquires it once.
        releases: the open releases as the gateway sees them; `refresh` reads them.
    """

    world: World
    clock: ShiftedClock
    parts: GatewayDependencies
    finalizer: Finalizer
    keys: ApiKeys
    url: str
    permits: threading.Semaphore
    lane: OpenLane
    worker: LaneWorker
    releases: OpenReleases
    bridge: LaneBridge
    beats: MemoryHeartbeats
    stop: threading.Event
    app: RequestMiddleware
    witness: Witness
    cache: ResponseCache
    overload: OverloadController | None = None

    def client(self, key: str = "none", **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", timeout=HANG_SECONDS, api_key=key, **{"max_retries": 0, **more})

    def http(self, key: str | None = None) -> httpx2.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=HANG_SECONDS)

    def ledger(self, job: str) -> JobLedger:
        return JobLedger(self.world.store, f"jobs/{job}/")


@contextmanager
def run_http_harness(
    folder: Path,
    *,
    auth: AuthMode = "auto",
    permits: int = 1_000_000,
    finalize: bool = True,
    settings: GatewayOptions | None = None,
    intake: IntakeSettings | None = None,
    inference: InferenceSettings | None = None,
    streams: StreamSettings | None = None,
    header_seconds: float = 20.0,
    max_connections: int = 4_000,
    s3: tuple[S3Store, S3Settings] | None = None,
    rates: RateSettings | None = None,
    limiter: RateLimiter | None = None,
    grace: float = 0.2,
    lane: OpenLane | None = None,
    cache: AnswerOptions | None = None,
    disk: Disk = LOCAL_DISK,
    overload: OverloadOptions | None = None,
) -> Iterator[HttpHarness]:
    """Run a gateway until the block ends.

    Args:
        permits: shards that the worker may commit; release `HttpHarness.permits` for more.
        finalize: run the finalizer in the background.
        s3: the root, instead of a folder.
        rates: the rate limits.  limiter: a rate limiter instead of one in memory.
        lane: instead of one in memory.
        cache: the settings of the answer store.
        disk: of the root's folder.
        grace: seconds that a worker has to finish the shards of a cancelled batch.
        overload: the overload control, which the test refreshes; None: none.
    """
    options = settings or GatewayOptions(drain_seconds=5.0)
    stop, permitted = threading.Event(), threading.Semaphore(permits)
    with ExitStack() as stack:
        store = stack.enter_context(FolderStore(folder / "root", disk=disk) if s3 is None else s3[0])
        reading = None if s3 is None else s3[1]
        clock = ShiftedClock()
        world = World(store, clock, SystemRandomness(), store.scratch)
        Catalog(store).publish(CatalogEntry(pin=PIN, max_model_len=2_048, published_at=clock.now()))
        executor = stack.enter_context(ThreadPoolExecutor(4))
        files, keys = Files(world, executor), ApiKeys(world, believed=0.0)
        finalizer = Finalizer(world, files, interval_seconds=0.05)
        beats = MemoryHeartbeats(clock, 60.0)
        http_metrics, dispatched = HttpMetrics(clock, GoodputMetrics(SloOptions().promises, 100)), DispatchMetrics()
        parts = GatewayDependencies(
            world,
            Authority(keys, auth),
            files,
            Batches(world, Intake(world, intake), files, finalizer, executor),
            ServedModels(store),
            Status(world, beats, 0.0),
            options,
            limiter or RateLimiter(clock, rates),
            http_metrics,
            Metrics(
                [
                    metric_collectors.workers(beats, each=True),
                    metric_collectors.dispatching(dispatched, clock),
                    metric_collectors.http(http_metrics),
                ]
            ),
        )
        lane = lane or MemoryLane(clock)
        releases = OpenReleases(world, lane)
        control = None
        if overload is not None:
            control = OverloadController(clock, beats, lane, MemoryDegradationBoard(clock), overload, PROMISES)
        worker, bridge = (
            LaneWorker(lane),
            LaneBridge(lane, clock, CallSettings(poll_interval_seconds=0.01), http_metrics, overload=control),
        )
        responses = ResponseCache(AnswerIndex(store, clock, cache or AnswerOptions()), clock)
        answers = InferenceResponses(
            InferenceRequestBuilder(
                world,
                inference,
                parts.rates,
                responses,
                overload=control,
                releases=releases,
            ),
            bridge,
            clock,
            streams,
            Mirror(releases, bridge, world),
        )
        server = GatewayServer(options, listen("127.0.0.1", 0), header_seconds, max_connections)
        with mock.patch("pipeline.gateway.app.build_schemas", SCHEMAS):
            app = make_app(parts, server.draining.is_set, answers)
        inside: Any = app.app
        given = repr(options), answers.builder.default_model
        if given not in DOCUMENTS:
            DOCUMENTS[given] = inside.openapi()
        witness = Witness(DOCUMENTS[given])
        watched: Any = Watched(app, witness)
        late = threading.Event()
        threads: list[Callable[[], Any]] = [
            lambda: server.run(watched, stop, lambda: answers.end_all(draining())),
            lambda: _work(world, beats, stop, permitted, reading, grace, dispatched),
            lambda: bridge.run(late),
            lambda: worker.run(late),
        ]
        if finalize:
            threads.append(lambda: finalizer.run(stop))
        started = [threading.Thread(target=thread) for thread in threads]
        for thread in started:
            thread.start()
        try:
            yield HttpHarness(
                world, clock, parts, finalizer, keys, server.url, permitted, lane, worker, releases, bridge, beats,
                stop, app, witness, responses, control,
            )  # fmt: skip
        finally:
            stop.set()
            permitted.release(1_000)
            started[0].join()
            late.set()
            for thread in started:
                thread.join()
        assert not witness.untrue, "\n".join(witness.untrue[:20])


def _work(
    world: World,
    beats: MemoryHeartbeats,
    stop: threading.Event,
    permits: threading.Semaphore,
    s3: S3Settings | None,
    grace: float,
    metrics: DispatchMetrics,
) -> None:
    queue = MemoryQueue()
    settings = DispatchSettings(grace_seconds=grace, cache_interval_seconds=0.05)
    dispatcher = Dispatcher(world, queue, beats, settings=settings, metrics=metrics)
    controller = JobController(
        world,
        dispatcher,
        lambda pinned: open_pinned(pinned, s3),
        JobControllerSettings(tick_interval_seconds=0.01, refresh_interval_seconds=0.02),
    )
    thread = threading.Thread(target=controller.run, args=(stop,))
    thread.start()
    client = ShardClient(
        "w", world, lambda job: JobLedger(world.store, f"jobs/{job}/"), queue, beats, lambda: False, models=MODELS
    )
    while not stop.is_set():
        work = client.take(0.01)
        if work is not None:
            permits.acquire()
            client.commit(work, computed(work), report(work))
    client.close()
    thread.join()


def lines(count: int, url: str = "/v1/chat/completions", **more: Any) -> bytes:
    """`count` requests for the harness's model, as JSONL. Every fifth response fails."""
    body = {"model": PIN.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    if url == "/v1/completions":
        body = {"model": PIN.name, "prompt": "hello", "max_tokens": 5}
    made = ({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body, **more} for n in range(count))
    return b"".join(orjson.dumps(line) + b"\n" for line in made)
