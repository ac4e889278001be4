"""HTTP as a part of an installation: by itself (`gateway`), or in the process that does everything (`serve`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.ports import PartStopped
from pipeline.runtime.supervision import supervise
from schemas.jobs.job import Tier
from tokenmill.errors import UserError
from tokenmill.root import Root, open_intake, warn_if_readable_by_all

if TYPE_CHECKING:
    from limits.storage import RedisStorage

    from pipeline.gateway.http.server import ServerSettings
    from pipeline.gateway.inference.request_builder import InferenceSettings
    from pipeline.gateway.inference.response_cache import AnswerCache, AnswerStore
    from pipeline.gateway.limits.concurrency import ConcurrencySlots
    from pipeline.gateway.limits.rate_limits import RateSettings
    from pipeline.gateway.routes.dependencies import GatewaySettings
    from pipeline.gateway.webhooks.service import Notifier
    from pipeline.observability.samples import Source
    from pipeline.ports import Lease
    from schemas.settings.settings import Settings
    from tokenmill.processes.runtime import Part
    from tokenmill.services.backends import Backends

_LOOKS_AT_ONCE = 16
_STORED_BYTES = 100 << 30
_STORED_FILES = 100_000
_BATCH_ROWS = 128
"""Of a worker's batch, unless it is started with another --max-num-seqs: a gateway isn't told."""

_REMOTE_LOOK_SECONDS = 2.0
_LANE_LOOK_SECONDS = 0.01
_REMOTE_LANE_LOOK_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class SharedBackends:
    """What several gateways share. None: there is only one.

    Attributes:
        lease: one of them writes the files of batches that have ended.  telling: one tells the webhooks.
        windows, running: where rate limits are counted.  answers: where they are kept.
    """

    lease: Lease | None = None
    windows: RedisStorage | None = None
    running: ConcurrencySlots | None = None
    telling: Lease | None = None
    answers: AnswerStore | None = None


class GatewayService:
    """The parts of HTTP, listening already: `url` says where, and `sources` tell what is told at `/metrics`.

    Args:
        shared: with other gateways; None: there are none.
        dispatching: tells how jobs stand, where this process dispatches them.
        batch_rows: of the engine's batch, where the engine is in this process.

    Raises:
        UserError: what it needs is not installed, or anybody on the network could use it without a key.
        CantListen: the address can't be had.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        hints: Backends,
        host: str,
        port: int,
        shared: SharedBackends | None = None,
        dispatching: Source | None = None,
        batch_rows: int | None = None,
    ) -> None:
        shared = shared or SharedBackends()
        try:
            from pipeline.gateway.http.server import GatewayServer, listen
            from pipeline.observability.exposition import Metrics
        except ModuleNotFoundError as error:
            raise UserError(
                f"{error.name} is not installed, and HTTP needs it; run: pip install 'tokenmill[gateway]'"
            ) from error
        from pipeline import metric_collectors
        from pipeline.gateway.batches.finalizer import Finalizer
        from pipeline.gateway.batches.service import Batches
        from pipeline.gateway.files.service import Files
        from pipeline.gateway.http.api_keys import ApiKeys
        from pipeline.gateway.http.auth import Authority
        from pipeline.gateway.http.metrics import HttpMetrics
        from pipeline.gateway.inference.models import ServedModels
        from pipeline.gateway.inference.request_builder import InferenceRequestBuilder
        from pipeline.gateway.inference.responses import StreamSettings
        from pipeline.gateway.limits.rate_limits import RateLimiter
        from pipeline.gateway.routes.dependencies import GatewayDependencies
        from pipeline.gateway.status import Status
        from pipeline.lane.client import CallSettings

        keys = ApiKeys(root.world)
        _check_open(settings, host, keys.exist())
        warn_if_readable_by_all(root)
        self._together = ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="looks")
        files = Files(root.world, self._together)
        every = 0.5 if root.folder else _REMOTE_LOOK_SECONDS
        self._finalizer = Finalizer(root.world, files, every, shared.lease)
        self._notifier = _notifier(root, settings, every, shared.telling)
        intake = open_intake(root, settings)
        status = Status(root.world, hints.heartbeats, 1.0 if root.folder else _REMOTE_LOOK_SECONDS)
        figures = HttpMetrics(root.world.clock)
        self.sources: list[Source] = [
            metric_collectors.workers(hints.heartbeats, each=settings.metrics.workers),
            dispatching or metric_collectors.installation(status),
            metric_collectors.http(figures),
            metric_collectors.intake(root.came_in, root.world.letters),
            metric_collectors.unexpected_errors(root.world.errors),
        ]
        self._parts = GatewayDependencies(
            world=root.world,
            authority=Authority(keys, settings.gateway.auth),
            files=files,
            batches=Batches(root.world, intake, files, self._finalizer, self._together),
            models=ServedModels(root.world.store),
            status=status,
            settings=_bounds(settings, host),
            rates=RateLimiter(
                root.world.clock, _rates(root, settings, hints, batch_rows), shared.windows, shared.running
            ),
            figures=figures,
            metrics=Metrics([metric_collectors.build, *self.sources]),
        )
        cache = _cache(root, settings, shared.answers)
        self._asker = InferenceRequestBuilder(root.world, _asking(settings), self._parts.rates, cache)
        self._streams = StreamSettings(buffer_bytes=settings.gateway.stream_bytes)
        # A request that is new isn't heard of before a look at the others ends.
        self._call = CallSettings(look=_LANE_LOOK_SECONDS if hints.lease is None else _REMOTE_LANE_LOOK_SECONDS)
        self._lane = hints.lane
        listening = _server(settings, host, port)
        self._server = GatewayServer(listening, listen(listening))
        self.url = self._server.url

    @property
    def parts(self) -> dict[str, Part]:
        """What works until it is told to stop, by name."""
        found: dict[str, Part] = {"http": self._serve, "finalizer": self._finalizer.run}
        return found if self._notifier is None else found | {"webhooks": self._notifier.run}

    def _serve(self, stop: threading.Event) -> None:
        from pipeline.gateway.app import make_app
        from pipeline.gateway.inference.lane_bridge import LaneBridge, draining
        from pipeline.gateway.inference.responses import Answers

        clock = self._parts.world.clock
        traces, ended = self._parts.world.traces, threading.Event()
        bridge = LaneBridge(self._lane, clock, self._call, self._parts.figures, traces=traces)
        answers = Answers(self._asker, bridge, clock, self._streams)
        looking = ("lane calls", bridge.run, ended, self._parts.world)
        calls = threading.Thread(target=supervise, args=looking, name="lane calls", daemon=True)
        calls.start()
        try:
            app = make_app(self._parts, self._server.draining.is_set, answers)
            self._server.run(app, stop, lambda: answers.end_all(draining()))
        except Exception as error:
            raise PartStopped(f"{self.url}: HTTP can't be served any more ({type(error).__name__}: {error})") from error
        finally:
            ended.set()
            calls.join()
            self._together.shutdown(wait=False, cancel_futures=True)


@contextmanager
def shared_on_redis(root: Root, settings: Settings) -> Iterator[SharedBackends]:
    """What gateways have in common; nothing where there is no Redis: then each of them does everything."""
    from pipeline.adapters.redis.connection import RedisClient, RedisSettings
    from pipeline.adapters.redis.lease import RedisLease
    from pipeline.adapters.redis.rate_limits import RedisRunning, redis_windows
    from pipeline.adapters.redis.response_cache import RedisAnswers
    from tokenmill.services.backends import LEASE_SECONDS

    with ExitStack() as closing:
        if settings.redis_url is None:
            yield SharedBackends()
            return
        connection = RedisSettings(settings.redis_url.get_secret_value())
        lease, telling = (
            RedisLease(connection, name, LEASE_SECONDS, root.world.clock, root.world.random)
            for name in ("finalizer", "webhooks")
        )
        closing.callback(lease.close)
        closing.callback(telling.close)
        client = RedisClient(connection)
        closing.callback(client.close)
        yield SharedBackends(
            lease,
            redis_windows(client),
            RedisRunning(client),
            telling,
            RedisAnswers(client, settings.gateway.cache.tenant_bytes),
        )


def _check_open(settings: Settings, host: str, has_keys: bool) -> None:
    from pipeline.gateway.http.server import is_loopback

    if settings.gateway.auth == "auto" and not has_keys and not is_loopback(host):
        raise UserError(
            f"--host {host} is open to the network, and there is no API key; make one with 'tokenmill keys create', or "
            "set TOKENMILL_GATEWAY__AUTH=off if everybody may use it"
        )


def _bounds(settings: Settings, host: str) -> GatewaySettings:
    from pipeline.gateway.routes.dependencies import GatewaySettings

    chosen = settings.gateway
    return GatewaySettings(
        most_upload_bytes=chosen.max_upload_bytes,
        uploads_at_once=chosen.uploads_at_once,
        most_body_bytes=chosen.max_body_bytes,
        bodies_at_once=chosen.bodies_at_once,
        idle_seconds=chosen.idle_seconds,
        requests_at_once=chosen.requests_at_once,
        max_websockets=chosen.max_websockets,
        max_tenant_websockets=chosen.max_tenant_websockets,
        hosts=(*chosen.hosts, host),
        limits=settings.limits,
    )


def _rates(root: Root, settings: Settings, hints: Backends, batch_rows: int | None) -> RateSettings:
    from pipeline.gateway.limits.rate_limits import RateSettings
    from pipeline.gateway.limits.storage_quota import StorageQuota
    from pipeline.gateway.limits.tenant_capacity import TenantCapacity

    chosen, default_rows, stored = settings.gateway, None, StorageQuota()
    if chosen.default_limits == "auto":
        half = max(1, (batch_rows or _BATCH_ROWS) // 2)
        default_rows = TenantCapacity(root.world.clock, hints.heartbeats, chosen.default_rows_per_worker or half).rows
        stored = StorageQuota(_STORED_BYTES, _STORED_FILES)
    return RateSettings(chosen.tenant_limits, chosen.tenants, chosen.key_limits, default_rows, stored)


def _notifier(root: Root, settings: Settings, every: float, lease: Lease | None) -> Notifier | None:
    """None: nobody wants to be told."""
    from pipeline.gateway.webhooks.client import Endpoint, Sender
    from pipeline.gateway.webhooks.service import Notifier, NotifierSettings, endpoint_id
    from schemas.settings.gateway import webhook_key

    chosen = settings.gateway.webhooks
    endpoints = [
        Endpoint(
            id=endpoint_id(tenant, one.url.get_secret_value()),
            tenant=tenant,
            url=one.url.get_secret_value(),
            secret=webhook_key(one.secret),
            events=frozenset(one.events),
        )
        for tenant, theirs in chosen.endpoints.items()
        for one in theirs
    ]
    if not endpoints:
        return None
    sender = Sender(chosen.timeout_seconds, allow_private=chosen.allow_private)
    patience = chosen.give_up_after.total_seconds()
    return Notifier(root.world, endpoints, sender, NotifierSettings(every=every, patience=patience), lease)


def _cache(root: Root, settings: Settings, answers: AnswerStore | None) -> AnswerCache:
    from pipeline.gateway.inference.response_cache import AnswerCache, CacheSettings, MemoryAnswers

    chosen, clock = settings.gateway.cache, root.world.clock
    bounds = CacheSettings(chosen.keep.total_seconds(), chosen.entry_bytes, chosen.entries, chosen.always)
    return AnswerCache(clock, answers or MemoryAnswers(clock, chosen.memory_bytes), bounds)


def _asking(settings: Settings) -> InferenceSettings:
    from pipeline.gateway.inference.request_builder import InferenceSettings

    return InferenceSettings(
        longest=settings.gateway.request_seconds,
        default_model=settings.default_model,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        default_max_tokens=settings.default_max_tokens,
        limits=settings.limits,
    )


def _server(settings: Settings, host: str, port: int) -> ServerSettings:
    from pipeline.gateway.http.server import ServerSettings

    chosen = settings.gateway
    return ServerSettings(
        host=host,
        port=port,
        certificate=chosen.tls_certificate,
        private_key=chosen.tls_key,
        drain_seconds=chosen.drain_seconds,
        write_seconds=chosen.write_seconds,
        unsent_bytes=chosen.unsent_bytes,
        keep_alive_seconds=chosen.keep_alive_seconds,
        max_message_bytes=min(chosen.max_message_bytes, chosen.max_body_bytes),
        message_seconds=chosen.idle_seconds,
        most_connections=2 * chosen.requests_at_once,
    )
