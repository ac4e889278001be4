"""HTTP as a part of an installation: by itself (`gateway`), or in the process that runs all parts (`serve`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.ports import ComponentStopped
from pipeline.runtime.supervision import supervise
from schemas.jobs.job import Tier
from tokenmill.errors import UserError
from tokenmill.root import Root, open_intake, warn_if_readable_by_all

if TYPE_CHECKING:
    from limits.storage import RedisStorage

    from pipeline.gateway.inference.request_builder import InferenceSettings
    from pipeline.gateway.limits.admission import RateSettings
    from pipeline.gateway.limits.concurrency_slots import ConcurrencySlots
    from pipeline.gateway.webhooks.service import Notifier
    from pipeline.observability.samples import Source
    from pipeline.overload.controller import OverloadController
    from pipeline.ports import Lease
    from schemas.settings.settings import Settings
    from tokenmill.processes.runtime import Part
    from tokenmill.services.backends import Backends

_MAX_READS = 16
_STORED_BYTES = 100 << 30
_STORED_FILES = 100_000
_REMOTE_POLL_SECONDS = 2.0
_LANE_POLL_SECONDS = 0.01
_REMOTE_LANE_POLL_SECONDS = 0.03
_ANSWERS_SECONDS = 2.0
"""Interval of listing the answers that other processes have stored for a tenant."""


@dataclass(frozen=True, slots=True)
class SharedBackends:
    """The state that several gateways share. None: there is only one gateway.

    Attributes:
        lease: of the gateway that writes the files of ended batches.  webhooks: of the one that sends webhooks.
        windows, running: counters of rate limits.
    """

    lease: Lease | None = None
    windows: RedisStorage | None = None
    running: ConcurrencySlots | None = None
    webhooks: Lease | None = None


class GatewayService:
    """The parts of HTTP, which listen at `url` already; `sources` are the metrics at `/metrics`. `route_counts`: the
    choices of virtual models' rules.

    Args:
        shared: state shared with other gateways; None: there are none.
        dispatching: metrics of jobs, where this process dispatches them.

    Raises:
        UserError: a package is missing, or HTTP would be open to the network without a key.
        CantListen: the address isn't available.
    """

    def __init__(
        self,
        root: Root,
        settings: Settings,
        backends: Backends,
        host: str,
        port: int,
        shared: SharedBackends | None = None,
        dispatching: Source | None = None,
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
        from pipeline.answers.index import AnswerIndex
        from pipeline.gateway.batches.finalizer import Finalizer
        from pipeline.gateway.batches.service import Batches
        from pipeline.gateway.files.service import Files
        from pipeline.gateway.http.api_keys import ApiKeys
        from pipeline.gateway.http.auth import Authority
        from pipeline.gateway.http.goodput import GoodputMetrics
        from pipeline.gateway.http.metrics import HttpMetrics
        from pipeline.gateway.inference.models import ServedModels
        from pipeline.gateway.inference.request_builder import InferenceRequestBuilder
        from pipeline.gateway.inference.response_cache import ResponseCache
        from pipeline.gateway.inference.responses import StreamSettings
        from pipeline.gateway.limits.admission import RateLimiter
        from pipeline.gateway.routes.dependencies import GatewayDependencies
        from pipeline.gateway.status import Status
        from pipeline.lane.client import CallSettings
        from pipeline.lane.placement import LatencyTargets
        from pipeline.lane.prefix_router import PrefixRouter
        from pipeline.models.open_releases import OpenReleases
        from tokenmill.services.virtual_models import model_resolver

        keys = ApiKeys(root.world)
        _check_open(settings, host, keys.has_keys())
        warn_if_readable_by_all(root)
        self._executor = ThreadPoolExecutor(_MAX_READS, thread_name_prefix="reads")
        files = Files(root.world, self._executor)
        interval_seconds = 0.5 if root.folder else _REMOTE_POLL_SECONDS
        self._finalizer = Finalizer(root.world, files, interval_seconds, shared.lease)
        self._notifier = _notifier(root, settings, interval_seconds, shared.webhooks)
        intake = open_intake(root, settings)
        status = Status(root.world, backends.heartbeats, 1.0 if root.folder else _REMOTE_POLL_SECONDS)
        routing, slo = settings.lane.routing, settings.lane.slo
        http_metrics = HttpMetrics(root.world.clock, GoodputMetrics(slo.promises, settings.metrics.max_tenants))
        is_free = settings.kv_transfer.hand_over == "auto"  # to send requests to decode workers as a whole
        targets = LatencyTargets(slo.ttft_seconds, slo.itl_seconds) if is_free else None
        self._router = (
            PrefixRouter(root.world.clock, backends.heartbeats, routing.max_load_ratio, targets)
            if routing.by_prefix
            else None
        )
        resolver = model_resolver(root.world, backends.heartbeats, backends.lane)
        self.route_counts = resolver.router.counts
        self._overload = _overload(root, settings, backends)
        self._releases = OpenReleases(root.world, backends.lane)
        clock = root.world.clock
        index = AnswerIndex(root.world.store, clock, settings.answers, refresh_seconds=_ANSWERS_SECONDS)
        self._responses = ResponseCache(index, clock)
        self.sources: list[Source] = [
            metric_collectors.stored_answers(index.counts, "http"),
            metric_collectors.virtual_models(self.route_counts),
            metric_collectors.workers(backends.heartbeats, each=settings.metrics.workers),
            dispatching or metric_collectors.installation(status),
            metric_collectors.http(http_metrics),
            metric_collectors.release_requests(self._releases),
            metric_collectors.intake(root.ingest_metrics, root.world.dead_letters),
            metric_collectors.unexpected_errors(root.world.errors),
            *([] if self._router is None else [metric_collectors.lane_routes(self._router)]),
            *([] if self._overload is None else [metric_collectors.overload(self._overload)]),
        ]
        self._parts = GatewayDependencies(
            world=root.world,
            authority=Authority(keys, settings.gateway.auth),
            files=files,
            batches=Batches(root.world, intake, files, self._finalizer, self._executor),
            models=ServedModels(root.world.store),
            status=status,
            settings=settings.gateway.model_copy(update={"hosts": (*settings.gateway.hosts, host)}),
            limits=settings.limits,
            rates=RateLimiter(root.world.clock, _rates(root, settings, backends), shared.windows, shared.running),
            http_metrics=http_metrics,
            metrics=Metrics([metric_collectors.build, *self.sources]),
        )
        self._request_builder = InferenceRequestBuilder(
            root.world,
            _inference_settings(settings),
            self._parts.rates,
            self._responses,
            resolver,
            self._overload,
            self._releases,
        )
        self._streams = StreamSettings(buffer_bytes=settings.gateway.max_stream_buffer_bytes)
        # The poll interval bounds the delay of a new request, which waits until the poll of the others ends.
        self._call = CallSettings(
            poll_interval_seconds=_LANE_POLL_SECONDS if backends.lease is None else _REMOTE_LANE_POLL_SECONDS
        )
        self._lane = backends.lane
        self._max_requests = settings.lane.max_gateway_requests
        self._server = GatewayServer(settings.gateway, listen(host, port, settings.gateway.max_unsent_bytes))
        self.url = self._server.url

    @property
    def parts(self) -> dict[str, Part]:
        """The parts, which work until a stop signal, by name."""
        found: dict[str, Part] = {
            "http": self._serve, "finalizer": self._finalizer.run, "releases": self._releases.run,
            "answers": self._responses.run,
        }  # fmt: skip
        if self._router is not None:
            found["prefix router"] = self._router.run
        if self._overload is not None:
            found["overload control"] = self._overload.run
        return found if self._notifier is None else found | {"webhooks": self._notifier.run}

    def _serve(self, stop: threading.Event) -> None:
        from pipeline.gateway.app import make_app
        from pipeline.gateway.inference.lane_bridge import LaneBridge, draining
        from pipeline.gateway.inference.mirroring import Mirror
        from pipeline.gateway.inference.responses import InferenceResponses

        clock = self._parts.world.clock
        traces, ended = self._parts.world.traces, threading.Event()
        bridge = LaneBridge(
            self._lane, clock, self._call, self._parts.http_metrics, self._max_requests, traces, self._router,
            self._overload,
        )  # fmt: skip
        mirror = Mirror(self._releases, bridge, self._parts.world)
        answers = InferenceResponses(self._request_builder, bridge, clock, self._streams, mirror)
        arguments = ("lane calls", bridge.run, ended, self._parts.world)
        calls = threading.Thread(target=supervise, args=arguments, name="lane calls", daemon=True)
        calls.start()
        try:
            app = make_app(self._parts, self._server.draining.is_set, answers)
            self._server.run(app, stop, lambda: answers.end_all(draining()))
        except Exception as error:
            raise ComponentStopped(
                f"{self.url}: HTTP can't be served any more ({type(error).__name__}: {error})"
            ) from error
        finally:
            ended.set()
            calls.join()
            self._responses.flush()
            self._executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def shared_on_redis(root: Root, settings: Settings) -> Iterator[SharedBackends]:
    """The state that gateways share; empty without Redis: then each gateway does everything."""
    from pipeline.adapters.redis.connection import RedisClient, RedisSettings
    from pipeline.adapters.redis.lease import RedisLease
    from pipeline.adapters.redis.rate_limit_counters import RedisRunning, redis_windows
    from tokenmill.services.backends import LEASE_SECONDS

    with ExitStack() as closing:
        if settings.redis_url is None:
            yield SharedBackends()
            return
        connection = RedisSettings(settings.redis_url.get_secret_value())
        lease, webhooks = (
            RedisLease(connection, name, LEASE_SECONDS, root.world.clock, root.world.random)
            for name in ("finalizer", "webhooks")
        )
        closing.callback(lease.close)
        closing.callback(webhooks.close)
        client = RedisClient(connection)
        closing.callback(client.close)
        yield SharedBackends(
            lease,
            redis_windows(client),
            RedisRunning(client),
            webhooks,
        )


def _check_open(settings: Settings, host: str, has_keys: bool) -> None:
    from pipeline.gateway.http.server import is_loopback

    if settings.gateway.auth == "auto" and not has_keys and not is_loopback(host):
        raise UserError(
            f"--host {host} is open to the network, and there is no API key; make one with 'tokenmill keys create', or "
            "set TOKENMILL_GATEWAY__AUTH=off if everybody may use it"
        )


def _rates(root: Root, settings: Settings, backends: Backends) -> RateSettings:
    from pipeline.gateway.limits.admission import RateSettings
    from pipeline.gateway.limits.storage_quota import StorageQuota
    from pipeline.gateway.limits.tenant_capacity import TenantCapacity

    chosen, default_rows, stored = settings.gateway, None, StorageQuota()
    if chosen.default_limits == "auto":
        default_rows = TenantCapacity(root.world.clock, backends.heartbeats, chosen.default_rows_per_worker).rows
        stored = StorageQuota(_STORED_BYTES, _STORED_FILES)
    return RateSettings(chosen.tenant_limits, chosen.tenants, chosen.key_limits, default_rows, stored)


def _overload(root: Root, settings: Settings, backends: Backends) -> OverloadController | None:
    """The overload control; None: no setting needs it."""
    from pipeline.overload.controller import OverloadController
    from pipeline.overload.forecast import Promises

    options, lane = settings.overload, settings.lane
    if not options.is_used:
        return None
    promises = Promises({tier: promise.ttft_seconds for tier, promise in lane.slo.promises.items()})
    return OverloadController(
        root.world.clock, backends.heartbeats, backends.lane, backends.degradation, options, promises, lane.max_requests
    )


def _notifier(root: Root, settings: Settings, interval_seconds: float, lease: Lease | None) -> Notifier | None:
    """The sender of webhooks; None: there are no endpoints."""
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
    retry_timeout_seconds = chosen.give_up_after.total_seconds()
    return Notifier(
        root.world,
        endpoints,
        sender,
        NotifierSettings(poll_interval_seconds=interval_seconds, retry_timeout_seconds=retry_timeout_seconds),
        lease,
    )


def _inference_settings(settings: Settings) -> InferenceSettings:
    from pipeline.gateway.inference.request_builder import InferenceSettings

    return InferenceSettings(
        max_timeout_seconds=settings.gateway.request_timeout_seconds,
        default_model=settings.default_model,
        caps={tier: settings.max_output_tokens.of(tier) for tier in Tier},
        default_max_tokens=settings.default_max_tokens,
        limits=settings.limits,
    )
