"""A worker's side of hand-overs, from its role and settings."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import structlog

from pipeline.lane.placement import LatencyTargets
from pipeline.lane.pool_loads import PoolLoads, PoolObserver
from pipeline.ports import Clock, Heartbeats
from schemas.settings.kv_transfer import KVTransferOptions, Role
from tokenmill.errors import UserError
from workers.kv_transfer.client import BlockClient
from workers.kv_transfer.server import BlockServer
from workers.lane.handover import DecodeHandover, LaneHandover, PrefillHandover
from workers.model.loaded_model import LoadedModel

_ANY_ADDRESS: Final = ("0.0.0.0", "::")

logger = structlog.get_logger(__name__)


@contextmanager
def open_handover(
    role: Role,
    model: LoadedModel,
    clock: Clock,
    options: KVTransferOptions,
    heartbeats: Heartbeats,
    targets: LatencyTargets,
    redis_url: str | None,
) -> Iterator[LaneHandover]:
    """The side of a worker with this role and model. `redis_url`: of the server that all machines reach. Raises
    `UserError` when blocks can't be served."""
    if role == "both":
        yield LaneHandover(role, options.help_after_seconds)
        return
    exchange = model.block_exchange
    if exchange is None:
        raise UserError(f"--role {role}: {model.name} has no KV blocks to exchange; leave --role out")
    step_tokens = model.max_num_batched_tokens
    if role == "decode":
        client = BlockClient(options.timeout_seconds, use_shared_memory=options.shared_memory)
        yield LaneHandover(role, options.help_after_seconds, decode=DecodeHandover(exchange, client, step_tokens))
        return
    try:
        server = BlockServer(exchange.identity, clock, _with_address(options, redis_url))
    except OSError as error:
        raise UserError(
            f"TOKENMILL_KV_TRANSFER__HOST {options.host}, port {options.port}: can't listen there "
            f"({error.strerror or error}); give an address of this machine, and a free port or 0"
        ) from error
    with server.running(), _loads(model.name, options, clock, heartbeats) as loads:
        logger.info("serving KV blocks", host=server.host, port=server.port)
        prefill = PrefillHandover(exchange, server, loads, targets, step_tokens)
        yield LaneHandover(role, options.help_after_seconds, prefill=prefill)


def _with_address(options: KVTransferOptions, redis_url: str | None) -> KVTransferOptions:
    """The options with the address that other workers connect to. Raises OSError if it can't be found out."""
    if options.advertised_host is not None or options.host not in _ANY_ADDRESS or redis_url is None:
        return options
    url, family = urlsplit(redis_url), socket.AF_INET if options.host == "0.0.0.0" else socket.AF_UNSPEC
    if url.hostname is None:
        raise OSError("Redis has no address; set TOKENMILL_KV_TRANSFER__ADVERTISED_HOST, too")
    family, kind, _, _, address = socket.getaddrinfo(url.hostname, url.port or 6379, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: the system chooses the interface
        return options.model_copy(update={"advertised_host": probe.getsockname()[0]})


@contextmanager
def _loads(
    model: str, options: KVTransferOptions, clock: Clock, heartbeats: Heartbeats
) -> Iterator[Callable[[], PoolLoads | None]]:
    """The model's loads, kept fresh on a thread until the block ends; None, so that nothing stays, with `always`."""
    if options.hand_over == "always":
        yield lambda: None
        return
    pools = PoolObserver(clock, heartbeats)
    pools.refresh()  # before the first request
    ended = threading.Event()
    thread = threading.Thread(target=pools.run, args=(ended,), name="pool-loads", daemon=True)
    thread.start()
    try:
        yield partial(pools.loads, model)
    finally:
        ended.set()
        thread.join()
