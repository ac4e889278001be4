"""Paged attention with torch operators: gathers a few sequences' blocks, then calls scaled_dot_product_attention.

The gathered keys and values of a group stay small enough for the cache of a core, so the copy costs little compared to
reading the pool once. Decoding sequences are sorted by length and processed in such groups with one small mask a group;
the query heads that share a KV head are rows of one query, so nothing is repeated. Prompt chunks are processed one
sequence at a time, in query tiles, each over just the keys it can see. A mask never spans the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionBatch, KVLayout
from engine.attention.storage import KVStorage
from engine.plan import BlockCopy

GATHER_BYTES = 3 << 20
"""Gathered K + V of one group of decoding sequences, in bytes: about the L2 cache of two cores."""

QUERY_TILE = 256
"""Query rows of a chunk that are attended at once, when a mask is needed."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """A group of decoding sequences: indices begin ... end - 1 of the length-sorted order.

    blocks: int64 [n * width] physical blocks, padded with block 0.  mask: [n, 1, 1, width * block_size], 0 or -inf.
    """

    begin: int
    end: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows begin ... end - 1 of the batch over gathered keys first ... last - 1; mask None: all keys are visible."""

    begin: int
    end: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prompt chunk: tokens begin ... end - 1 of the batch. `blocks` None: the chunk starts its sequence and is
    plainly causal, so its own keys suffice and nothing is gathered."""

    begin: int
    end: int
    blocks: Tensor | None
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One cache group's share of the step."""

    slots: Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    order: Tensor | None
    inverse: Tensor | None


class PagedSdpaAttention:
    """The CPU's default backend where no native kernel is built; correct, but slow, on any other device."""

    name = "paged-sdpa"

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = KVStorage(layout, dtype, device)
        self._device = device
        self._dtype = dtype
        stores = 1 if layout.latent_dim else 2
        block_bytes = stores * layout.block_size * self.storage.token_width * dtype.itemsize
        self._group_blocks = max(1, GATHER_BYTES // block_bytes)
        self._keys = torch.empty(0, dtype=dtype, device=device)
        self._values = torch.empty(0, dtype=dtype, device=device)

    def prepare(self, batch: AttentionBatch) -> tuple[GroupStep, ...]:
        starts, counts = batch.starts.astype(np.int64), batch.counts.astype(np.int64)
        steps = []
        for index, group in enumerate(self.storage.layout.groups):
            table = batch.block_tables[index]
            decodes, order = self._decode_groups(starts[: batch.num_decodes], table, group.window)
            inverse = None
            if order is not None:
                inverse = torch.from_numpy(np.argsort(order)).to(self._device)
            chunks = self._chunks(starts, counts, batch.num_decodes, table, group.window)
            steps.append(
                GroupStep(
                    torch.from_numpy(batch.slot_mapping[index]).to(self._device),
                    decodes,
                    chunks,
                    None if order is None else torch.from_numpy(order).to(self._device),
                    inverse,
                )
            )
        widest = max((g.blocks.numel() for s in steps for g in s.decodes), default=0)
        widest = max(
            widest, max((c.blocks.numel() for s in steps for c in s.chunks if c.blocks is not None), default=0)
        )
        self._reserve(widest)
        return tuple(steps)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: tuple[GroupStep, ...],
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        storage = self.storage
        part = step[storage.group_of[layer]]
        storage.write(layer, k, v, part.slots)
        out = q.new_empty(*q.shape[:2], self.storage.layout.value_dim)
        if k is None or v is None:
            k, v = storage.read(layer, part.slots)
        if self.storage.layout.latent_dim:
            v = k  # torch's fast kernels take values as long as keys: the rest is computed for nothing, and dropped
        if part.decodes:
            count = part.decodes[-1].end
            self._attend_decodes(layer, q[:count], scale, sinks, part, out[:count])
        for chunk in part.chunks:
            self._attend_chunk(layer, q, k, v, scale, sinks, chunk, out)
        return out

    def block_tensors(self, group: int) -> list[Tensor]:
        return self.storage.block_tensors(group)

    def layer_cache(self, layer: int, step: object) -> None:
        """`attend` stores keys and values itself."""

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        self.storage.copy(group, copies)

    def _decode_groups(
        self, positions: NDArray[np.int64], table: NDArray[np.int32], window: int | None
    ) -> tuple[tuple[DecodeGroup, ...], NDArray[np.int64] | None]:
        """Divide the decoding sequences, sorted by the blocks they read, into groups that fit the gather buffer."""
        if not len(positions):
            return (), None
        block_size = self.storage.layout.block_size
        first_key = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
        first_block = first_key // block_size
        widths = positions // block_size + 1 - first_block
        order = np.argsort(widths, kind="stable")
        groups, begin = [], 0
        while begin < len(order):
            end = begin + 1
            while end < len(order) and (end + 1 - begin) * widths[order[end]] <= self._group_blocks:
                end += 1
            members = order[begin:end]
            width = int(widths[members[-1]])
            columns = first_block[members][:, None] + np.arange(width)
            # Columns past a sequence's last block hold NO_BLOCK or are clipped; both are masked below.
            blocks = table[members[:, None], np.minimum(columns, table.shape[1] - 1)]
            key_at = (first_block[members] * block_size)[:, None] + np.arange(width * block_size)
            hidden = (key_at > positions[members][:, None]) | (key_at < first_key[members][:, None])
            blocks = np.where(columns * block_size > positions[members][:, None], 0, blocks)
            mask = torch.zeros((len(members), 1, 1, width * block_size), dtype=self._dtype)
            mask.masked_fill_(torch.from_numpy(hidden)[:, None, None], float("-inf"))
            flat = torch.from_numpy(np.ascontiguousarray(blocks.reshape(-1), dtype=np.int64))
            groups.append(DecodeGroup(begin, end, flat.to(self._device), mask.to(self._device)))
            begin = end
        return tuple(groups), order

    def _chunks(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        num_decodes: int,
        table: NDArray[np.int32],
        window: int | None,
    ) -> tuple[Chunk, ...]:
        block_size = self.storage.layout.block_size
        chunks, end = [], num_decodes
        for i in range(num_decodes, len(starts)):
            start, count = int(starts[i]), int(counts[i])
            begin, end = end, end + count
            # A sink is a column of the mask, which only tiles keep small.
            if start == 0 and (window is None or count <= window) and not self.storage.layout.has_sinks:
                chunks.append(Chunk(begin, end, None, ()))
                continue
            first_block = 0 if window is None else max(start - window + 1, 0) // block_size
            last_block = -(-(start + count) // block_size)
            blocks = torch.from_numpy(table[i, first_block:last_block].astype(np.int64)).to(self._device)
            base = first_block * block_size
            tiles = tuple(self._tiles(begin, start, count, base, window))
            chunks.append(Chunk(begin, end, blocks, tiles))
        return tuple(chunks)

    def _tiles(self, begin: int, start: int, count: int, base: int, window: int | None) -> list[QueryTile]:
        """Divide a chunk's queries into tiles; keys are counted from position `base`, the first one gathered."""
        tiles = []
        for at in range(0, count, QUERY_TILE):
            rows = min(QUERY_TILE, count - at)
            first_query = start + at
            first = base if window is None else max(first_query - window + 1, base)
            last = first_query + rows
            key_at = torch.arange(first, last)[None, :]
            query_at = torch.arange(first_query, last)[:, None]
            hidden = key_at > query_at
            if window is not None:
                hidden |= key_at <= query_at - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf")).to(self._device)
            tiles.append(QueryTile(begin + at, begin + at + rows, first - base, last - base, mask))
        return tiles

    def _reserve(self, num_blocks: int) -> None:
        """Grow the gather buffers, in whole groups, so that a run allocates them a few times at most."""
        width = self.storage.layout.block_size * self.storage.token_width
        if num_blocks * width > self._keys.numel():
            size = -(-num_blocks // self._group_blocks) * self._group_blocks * width
            self._keys = torch.empty(size, dtype=self._dtype, device=self._device)
            if not self.storage.layout.latent_dim:
                self._values = torch.empty(size, dtype=self._dtype, device=self._device)

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Gather K and V of these blocks, [blocks, block_size * kv_heads * head_dim], in the persistent buffers; the
        same ones where V is in K."""
        count, width = blocks.numel(), self.storage.layout.block_size * self.storage.token_width
        keys = self._keys[: count * width].view(count, width)
        torch.index_select(self.storage.keys[layer], 0, blocks, out=keys)
        if self.storage.layout.latent_dim:
            return keys, keys
        values = self._values[: count * width].view(count, width)
        torch.index_select(self.storage.values[layer], 0, blocks, out=values)
        return keys, values

    def _attend_decodes(
        self, layer: int, q: Tensor, scale: float, sinks: Tensor | None, part: GroupStep, out: Tensor
    ) -> None:
        layout = self.storage.layout
        assert part.order is not None
        assert part.inverse is not None
        kv_heads, head_dim = layout.num_kv_heads, layout.head_dim
        queries = q.index_select(0, part.order).view(q.shape[0], kv_heads, -1, head_dim)
        ordered = q.new_empty(*queries.shape[:3], layout.value_dim)
        for group in part.decodes:
            keys, values = self._gather(layer, group.blocks)
            count = group.end - group.begin
            of_group = (
                keys.view(count, -1, kv_heads, head_dim).transpose(1, 2),
                values.view(count, -1, kv_heads, head_dim).transpose(1, 2),
                group.mask,
            )
            if sinks is not None:
                of_group = with_sinks(*of_group, sinks.view(1, kv_heads, -1, 1))
            result = scaled_dot_product_attention(
                queries[group.begin : group.end], of_group[0], of_group[1], attn_mask=of_group[2], scale=scale
            )
            ordered[group.begin : group.end] = result[..., : layout.value_dim]
        torch.index_select(ordered.view(out.shape), 0, part.inverse, out=out)

    def _attend_chunk(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None, chunk: Chunk, out: Tensor
    ) -> None:
        layout = self.storage.layout
        if chunk.blocks is None:
            rows = slice(chunk.begin, chunk.end)
            self._attend_tile(q[rows], k[rows], v[rows], None, scale, sinks, out[rows])
            return
        shape = (-1, layout.num_kv_heads, layout.head_dim)
        keys, values = (gathered.view(shape) for gathered in self._gather(layer, chunk.blocks))
        for tile in chunk.tiles:
            rows, seen = slice(tile.begin, tile.end), slice(tile.first, tile.last)
            self._attend_tile(q[rows], keys[seen], values[seen], tile.mask, scale, sinks, out[rows])

    def _attend_tile(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None, out: Tensor
    ) -> None:
        """Attend q [Q, heads, D] over k and v [K, kv_heads, D]; mask None is plainly causal (Q == K)."""
        rows, kv_heads, head_dim = q.shape[0], k.shape[1], k.shape[2]
        # KV heads as the batch and the heads that share one as heads, by a stride of 0: GQA without a copy.
        queries = q.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        shape = (kv_heads, queries.shape[1], k.shape[0], head_dim)
        keys, values = (x.permute(1, 0, 2).unsqueeze(1).expand(shape) for x in (k, v))
        if sinks is not None:
            if mask is None:
                mask = torch.full((rows, rows), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
            keys, values, mask = with_sinks(keys, values, mask, sinks.view(kv_heads, -1, 1, 1))
        result = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        value_dim = out.shape[2]
        out.view(rows, kv_heads, -1, value_dim).copy_(result[..., :value_dim].permute(2, 0, 1, 3))


def with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key and a value of zeros, whose score is the mask's: the sinks.

    Args:
        keys, values: [batch, heads, K, head_dim].  mask: added to the scores [batch, heads, Q, K], or what broadcasts.
        sinks: float32, broadcasts to [batch, heads, Q, 1].
    """
    mask, sinks = mask + torch.zeros_like(sinks, dtype=mask.dtype), sinks.to(mask.dtype)
    mask = torch.cat((mask, sinks.expand(*mask.shape[:-1], 1)), dim=-1)
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), mask
