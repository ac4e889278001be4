"""A worker's side of hand-overs, from its role and settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from pipeline.ports import Clock
from schemas.settings.kv_transfer import KVTransferOptions, Role
from tokenmill.errors import UserError
from workers.kv_transfer.client import BlockClient
from workers.kv_transfer.server import BlockServer
from workers.lane.handover import DecodeHandover, LaneHandover, PrefillHandover
from workers.model.loaded_model import LoadedModel

logger = structlog.get_logger(__name__)


@contextmanager
def open_handover(role: Role, model: LoadedModel, clock: Clock, options: KVTransferOptions) -> Iterator[LaneHandover]:
    """The side of a worker with this role and model. Raises `UserError` when blocks can't be served."""
    if role == "both":
        yield LaneHandover(role, options.help_after_seconds)
        return
    exchange = model.block_exchange
    if exchange is None:
        raise UserError(f"--role {role}: {model.name} has no KV blocks to exchange; leave --role out")
    if role == "decode":
        client = BlockClient(options.timeout_seconds, use_shared_memory=options.shared_memory)
        yield LaneHandover(role, options.help_after_seconds, decode=DecodeHandover(exchange, client))
        return
    try:
        server = BlockServer(exchange.identity, clock, options)
    except OSError as error:
        raise UserError(
            f"TOKENMILL_KV_TRANSFER__HOST {options.host}, port {options.port}: can't listen there "
            f"({error.strerror or error}); give an address of this machine, and a free port or 0"
        ) from error
    with server.running():
        logger.info("serving KV blocks", host=options.host, port=server.port)
        yield LaneHandover(role, options.help_after_seconds, prefill=PrefillHandover(exchange, server))
