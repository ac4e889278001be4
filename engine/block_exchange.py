"""Exports the blocks of a running request, and imports those that another engine exported: the keys and values of a
prompt that one engine computed are used by another one, as in DistServe (Zhong et al. 2024, section 4) and Mooncake
(Qin et al. 2024, section 5).

Importing inserts into the prefix cache: a request that is added afterwards hits the blocks, and computes what is
missing. So a block that was lost costs its computation, and nothing else. Keys are never taken from the exporter: the
importer derives them from its own request (`block_keys`), and an exporter of another model, arithmetic or layout has
another `identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.cache.block_tier import BlockKey, Bytes
from engine.cache.prefix import HashChain, chain_digest
from engine.request import Request
from engine.runner.second_tier import SecondTier
from engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class ExportedBlock:
    """A block that was copied, or is being copied.

    Attributes:
        index: of the block in the prompt.  num_bytes: of `content`.
        content: waits for its bytes, uint8 [bytes]; any thread may call it.
    """

    key: BlockKey
    index: int
    num_bytes: int
    content: Callable[[], Bytes]


class BlockExchange:
    """The exchange of one engine. `block_keys` and `num_cached` may be called on any thread; the rest where the engine
    is stepped.

    Attributes:
        identity: 32 bytes; blocks of an engine with another identity can't be used.
        block_bytes: per cache group, bytes of a block.  block_tokens: tokens of a block.
        token_bytes: mean bytes of a token's keys and values.
    """

    def __init__(
        self, scheduler: Scheduler, tier: SecondTier, identity: str, block_tokens: int, rope_original_max: int | None
    ) -> None:
        assert tier.imported is not None, "the settings enable the exchange"
        self.identity = blake2b(identity.encode(), digest_size=32).digest()
        self.block_bytes = tier.block_bytes
        self.block_tokens = block_tokens
        self.token_bytes = sum(tier.block_bytes) // block_tokens
        self._scheduler = scheduler
        self._tier = tier
        self._imported = tier.imported
        self._rope_original_max = rope_original_max

    def block_keys(self, request: Request) -> list[BlockKey]:
        """Return the keys of all whole blocks of the request's prompt, of each cache group, its beginning first."""
        tokens, size = request.prompt_token_ids, self.block_tokens
        chain = self._chain(request)
        found = []
        for block in range(len(tokens) // size):
            token_bytes = np.ascontiguousarray(tokens[block * size : (block + 1) * size]).tobytes()
            digest = chain.of_block(block, token_bytes)
            found += [BlockKey(group, digest, token_bytes) for group in range(len(self.block_bytes))]
        return found

    def num_cached(self, request: Request) -> int:
        """Return how many leading blocks of the request's prompt the prefix cache holds, in each cache group those that
        a hit needs. Those that are evicted before the request is added are computed."""
        return self._scheduler.num_cached(self._chain(request), request.prompt_token_ids)

    def _chain(self, request: Request) -> HashChain:
        return HashChain.of_prompt(
            request.salt, len(request.prompt_token_ids), self._rope_original_max, chain_digest,
            self._scheduler.places.digest(request.adapter),
        )  # fmt: skip

    def export_blocks(self, request_id: str) -> list[ExportedBlock]:
        """Copy the blocks of a running request that another engine needs to go on with it, the beginning of its prefix
        first. Empty: it is not running, or its first block is not whole."""
        blocks = self._scheduler.blocks_to_export(request_id)
        index_of = {key: index for key, _, index in blocks}
        found = self._tier.read([(key, block) for key, block, _ in blocks])
        return [ExportedBlock(key, index_of[key], self.block_bytes[key.group], content) for key, content in found]

    def cached_tokens(self, request_id: str) -> int:
        """Return the prompt tokens that an open request took from the prefix cache here."""
        return self._scheduler.cached_tokens(request_id)

    @property
    def used_bytes(self) -> int:
        """Bytes of imported blocks that requests have loaded since the start. The others wait, or were dropped."""
        return self._imported.stats().bytes_read

    def import_blocks(self, blocks: Iterable[tuple[BlockKey, Bytes]]) -> None:
        """Insert blocks into the prefix cache: uint8 [bytes of a block of the group], by a key of `block_keys`, the
        beginning of a prefix first. Requests that are added afterwards hit them."""
        for key, data in reversed(list(blocks)):  # without its beginning, the rest of a prefix is of no use
            assert len(data) == self.block_bytes[key.group], "its size was compared when it was received"
            self._imported.store(key, data)
