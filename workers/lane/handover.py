"""Hands requests over between workers that compute prompts and workers that go on with the answers.

A prefill worker computes a prompt and emits its first token. Then it offers the prompt's KV blocks, and hands the
request back with the address (`HandBackEvent.kv_source`). The lane's client sends the next attempt with the tokens so
far and this address. A decode worker fetches the blocks that its prefix cache lacks, imports them, and continues the
answer as after any hand-back: what it can't fetch it computes. So neither a lost worker nor a broken transfer costs a
request more than its prompt's computation.

Handed over are answers to one prompt that another engine can resume (so none with log-probabilities, whose tokens the
caller's attempts don't carry), if they are sooner complete there
(`pipeline.lane.placement`). Without memory for the blocks, the prefill worker completes the answer itself; so it does
with requests that were handed over, which it takes when no decode worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from engine.block_exchange import BlockExchange
from engine.cache.block_tier import BlockKey, Bytes
from engine.request import Request
from pipeline.lane.placement import LatencyTargets, Placement, RequestSize
from pipeline.lane.pool_loads import PoolLoads
from schemas.requests.parsing import GenerationBody
from schemas.settings.kv_transfer import KVTransferOptions, Role
from schemas.workers.lane import KVSource, LaneRequest
from schemas.workers.metrics import HandoverMetrics
from workers.kv_transfer.client import BlockClient
from workers.kv_transfer.server import BlockServer
from workers.kv_transfer.wire import Deadline, Expected
from workers.rows import PreparedRow

logger = structlog.get_logger(__name__)

Blocks = Sequence[tuple[BlockKey, Bytes]]

NUM_FETCHES: Final = 4
"""Transfers that a worker receives at a time."""


class PrefillHandover:
    """Offers the blocks of requests whose prompt is computed. The worker's loop calls all methods.

    Args:
        loads: of the model's workers; None: unknown.  step_tokens: of this worker's engine.
    """

    def __init__(
        self,
        exchange: BlockExchange,
        server: BlockServer,
        loads: Callable[[], PoolLoads | None],
        targets: LatencyTargets,
        step_tokens: int,
    ) -> None:
        self._exchange = exchange
        self._server = server
        self._loads = loads
        self._targets = targets
        self._step_tokens = step_tokens
        self._stayed = 0
        self._offered = 0

    def should_hand_over(self, request: LaneRequest, row: PreparedRow) -> bool:
        """Whether a request should go on elsewhere. One that was handed over before should not."""
        computing = row.request
        if (
            request.kv_source is not None
            or not isinstance(row.body, GenerationBody)
            or computing.more
            or computing.params.logprobs is not None
            or computing.params.scored_from is not None
            or len(computing.prompt_token_ids) < self._exchange.block_tokens
        ):
            return False
        is_sooner = self._is_sooner_elsewhere(computing)
        self._stayed += not is_sooner
        return is_sooner

    def _is_sooner_elsewhere(self, request: Request) -> bool:
        """Whether the answer, whose prompt is computed, is sooner complete at a decode worker. Yes while loads are not
        known: that is what the roles are for."""
        if (loads := self._loads()) is None:
            return True
        prompt = len(request.prompt_token_ids)
        answer = max(1, min(request.params.max_tokens, round(loads.answer_tokens)))
        size = RequestSize(prompt, prompt - 1, answer)
        choices = (Placement.SPLIT, Placement.WHOLE_ON_PREFILL)
        return loads.best(size, self._targets, choices) is Placement.SPLIT

    def offer(self, request: Request) -> KVSource | None:
        """Offer the blocks of a request that is running in the engine; None: it has none, or there is no memory for
        them."""
        if not self._server.has_room(len(request.prompt_token_ids) * self._exchange.token_bytes):
            return None
        request_id = request.request_id
        blocks = self._exchange.export_blocks(request_id)
        source = self._server.offer(blocks) if blocks else None
        if source is None:
            return None
        self._offered += 1
        return replace(source, cached_tokens=self._exchange.cached_tokens(request_id))

    def metrics(self) -> HandoverMetrics:
        """The counters since the worker began to serve the model."""
        self._server.expire()
        served = self._server.served
        return HandoverMetrics(
            role="prefill",
            block_tokens=self._exchange.block_tokens,
            token_bytes=self._exchange.token_bytes,
            step_tokens=self._step_tokens,
            offered_requests=self._offered,
            stayed_requests=self._stayed,
            refused_requests=served.refused,
            sent_bytes=served.num_bytes,
            expired_offers=served.expired,
            broken_transfers=served.failed,
        )


class DecodeHandover:
    """Fetches the blocks of requests that were handed over, on threads of its own, and imports them. `step_tokens`: of
    this worker's engine."""

    def __init__(self, exchange: BlockExchange, client: BlockClient, step_tokens: int) -> None:
        self._exchange = exchange
        self._client = client
        self._step_tokens = step_tokens
        self._used_before = exchange.used_bytes
        self._threads = ThreadPoolExecutor(NUM_FETCHES, thread_name_prefix="kv-fetch")
        self._fetched = 0

    def fetch(self, source: KVSource, request: Request, then: Callable[[Blocks], None]) -> None:
        """Fetch the blocks of a request's prompt, and call `then` with those that arrived, on another thread."""
        self._threads.submit(self._fetch, source, request, then, self._client.deadline())

    def _fetch(self, source: KVSource, request: Request, then: Callable[[Blocks], None], deadline: Deadline) -> None:
        exchange = self._exchange
        blocks: Blocks = ()
        try:
            num_held = exchange.num_cached(request)
            names = exchange.block_keys(request)[num_held * len(exchange.block_bytes) :]
            # Also if none is missing: the offer's memory is free then.
            expected = Expected(names, exchange.block_bytes, exchange.identity, num_held)
            blocks = self._client.fetch(source, expected, deadline)
            self._fetched += bool(blocks) or num_held > 0
        except Exception as error:  # noqa: BLE001 - of this transfer alone
            logger.error("blocks were not fetched; they are computed", error=f"{type(error).__name__}: {error}")
        finally:
            then(blocks)

    def import_blocks(self, blocks: Blocks) -> None:
        """Import fetched blocks, on the thread that steps the engine, before their request is added."""
        self._exchange.import_blocks(blocks)

    def close(self) -> None:
        """Cut the fetches off, and wait until their requests have arrived without the blocks."""
        self._client.close()
        self._threads.shutdown(wait=True)

    def metrics(self) -> HandoverMetrics:
        """The counters since the worker began to serve the model."""
        fetched = self._client.fetched
        return HandoverMetrics(
            role="decode",
            block_tokens=self._exchange.block_tokens,
            token_bytes=self._exchange.token_bytes,
            step_tokens=self._step_tokens,
            fetched_requests=self._fetched,
            received_bytes=fetched.num_bytes,
            held_bytes=fetched.held_bytes,
            used_bytes=self._exchange.used_bytes - self._used_before,
            broken_transfers=fetched.failed,
            fetch_seconds=fetched.seconds,
        )


class LaneHandover(NamedTuple):
    """A worker's side of hand-overs.

    Attributes:
        role: a prefill worker has `prefill`, a decode worker `decode`, another one neither.
        help_after_seconds: it takes requests of another role that have waited for so long.
    """

    role: Role = "both"
    help_after_seconds: float = KVTransferOptions().help_after_seconds
    prefill: PrefillHandover | None = None
    decode: DecodeHandover | None = None


NO_HANDOVER: Final = LaneHandover()
"""The worker computes whole requests."""
