"""Paged attention by Triton kernels: the default on every GPU that Triton supports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import WARM_UP_TOKENS, AttentionBatch, KVLayout
from engine.attention.shared_prefixes import SharedPrefix, shared_prefixes
from engine.attention.storage import KVStorage
from engine.attention.triton_tiling import Tile, Tiling, shared_memory
from engine.models.base import LayerCache
from engine.plan import BlockCopy
from engine.triton_kernels.attention import (
    attend_shared,
    attend_tiles,
    join_splits,
    store_tokens,
    store_tokens_scaled,
)

FP8 = torch.float8_e4m3fn

LAUNCHES_BYTES = 16 << 20
"""Bytes of a layer that sharing prefixes must save at least: what a Hopper reads in the 4 microseconds that two more
launches take."""


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """A launch for the keys that decoding sequences begin with together.

    Attributes:
        keys: int32 [B], of each sequence, that this launch takes; 0: none.
        rows: int32 [tiles * queries], the sequences of each tile; -1: none.
        tile_keys: int32 [tiles], that its sequences share; 0: an unused tile.
        splits: programs that share the keys of each tile.
        group: of the cache.
    """

    keys: Tensor
    rows: Tensor
    tile_keys: Tensor
    splits: int
    group: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A launch: int32 [tiles] sequences and first queries of the programs, and their tiling.

    Attributes:
        first_token, tokens: the rows of q that belong to these sequences.
        splits: programs that share the keys of each tile.
        shared: keys that another launch takes; None: there are none.
    """

    sequences: Tensor
    firsts: Tensor
    first_token: int
    tokens: int
    tile: Tile
    splits: int
    shared: SharedTiles | None = None

    @property
    def count(self) -> int:
        return len(self.sequences)

    @property
    def shape(self) -> tuple[Tile, bool, bool]:
        """What a kernel is compiled for: the tile, whether its sums are parts, and whether some keys are shared."""
        return self.tile, self.splits > 1 or self.shared is not None, self.shared is not None


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step's ranges on the device.

    Attributes:
        starts, counts, begins: int32 [B].
        tables, slots: per cache group int32 [B, width] and int32 [T].
        launches: decoding sequences, then chunks; either may be missing.
        buffer: int32, the buffer of a reserved step, which holds all but the tables; else None.
    """

    starts: Tensor
    counts: Tensor
    begins: Tensor
    tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    launches: tuple[Tiles, ...]
    buffer: Tensor | None = None


class TritonPagedAttention:
    """Attention by Triton kernels over blocks of any size.

    Args:
        dtype: of the cache: that of q, or float8_e4m3fn, whose values have a scale for each token and head.
        upcast: for Triton's interpreter, which gets products of bfloat16 and the rounding to float8 wrong: multiply
            in float32, round by hand.
        processors: of the device, which small batches are spread over; None: queried.
        shared: bytes of shared memory of a program there; None: queried.

    Raises:
        EngineError: the device has too little shared memory for this layout.
    """

    name = "triton"

    def __init__(
        self,
        layout: KVLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        upcast: bool = False,
        processors: int | None = None,
        shared: int | None = None,
    ) -> None:
        if processors is None:
            on_cuda = device.type == "cuda"
            processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
        self._tiling = Tiling(layout, dtype, processors, shared_memory(device) if shared is None else shared)
        self.storage = KVStorage(layout, dtype, device)
        self._device = device
        self._upcast = upcast
        whole = (index for index, group in enumerate(layout.groups) if group.window is None)
        self._shared_group = next(whole, None) if self._tiling.chunk.queries > 1 else None
        stored = layout.head_dim + (0 if layout.latent_dim else layout.value_dim)
        self._token_bytes = layout.num_kv_heads * stored * dtype.itemsize  # of a layer
        self._part_bytes = 2 * 4 * layout.num_kv_heads * self._tiling.sharing * layout.value_dim  # written and read
        self._tables: tuple[Tensor, ...] = ()  # of reserved steps, which are read one after the other

    @property
    def num_groups(self) -> int:
        """Of the cache."""
        return len(self.storage.layout.groups)

    @property
    def can_share(self) -> bool:
        """See `SharingAttention.can_share`; not where a program takes the heads of one sequence alone."""
        return self._shared_group is not None

    def prepare(self, batch: AttentionBatch) -> TritonStep:
        decodes = batch.num_decodes
        tiles = [(_arange(decodes), np.zeros(decodes, np.int32)), self._chunk_tiles(batch)]
        parts = [*_ranges(batch), *batch.block_tables, *(part for pair in tiles for part in pair)]
        longest = int(batch.starts[:decodes].max(initial=0)) + 1
        prefixes = self.find_shared(batch)
        if prefixes is not None:
            parts += self._shared_tiles(prefixes, len(batch.starts))
            longest = int((batch.starts[:decodes] + 1 - parts[-3][:decodes]).max())
        starts, counts, begins, *rest = self._carry(parts)
        slots, tables, at = _cut(rest, self.num_groups)
        launches = []
        if decodes:
            shared = None if prefixes is None else self._share(at[4:], decodes, int(parts[-1].max()))
            splits = self._tiling.splits(decodes, longest, self._tiling.decode)
            launches.append(Tiles(at[0], at[1], 0, decodes, self._tiling.decode, splits, shared))
        if chunks := len(at[2]):
            splits = self._tiling.splits(chunks, int((batch.starts + batch.counts)[decodes:].max()), self._tiling.chunk)
            tokens = int(batch.counts[decodes:].sum())
            launches.append(Tiles(at[2], at[3], decodes, tokens, self._tiling.chunk, splits))
        return TritonStep(starts, counts, begins, tables, slots, tuple(launches))

    def reserve(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> TritonStep:
        """Allocate a step with persistent buffers, which `refill` fills and `attend` reads repeatedly, for a captured
        graph. The largest one is reserved first; all of them are filled and read one after the other.

        The number of key splits follows from the largest step that it can hold, and so does its rounding.

        Args:
            tokens, sequences: of the step, padding included. In a mixed step the last sequence is always padding.
            decodes: maximum of sequences with a single token; in a step that is not mixed all of them.
            mixed: sequences may have more than one token.
            table_width: entries of a whole block table.
        """
        return self._reserve(tokens, sequences, decodes, mixed, table_width, shared=False)

    def reserve_shared(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> TritonStep:
        """As `reserve`, for steps whose prefixes are shared."""
        return self._reserve(tokens, sequences, decodes, mixed, table_width, shared=self.can_share)

    def _reserve(
        self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int, *, shared: bool
    ) -> TritonStep:
        if not self._tables or len(self._tables[0]) < sequences or self._tables[0].shape[1] != table_width:
            shape = (sequences, table_width)
            self._tables = tuple(
                torch.zeros(shape, dtype=torch.int32, device=self._device) for _ in range(self.num_groups)
            )
        # A chunk has two tokens or more, and leaves at most one tile that is not full.
        chunks = tokens // self._tiling.chunk.queries + min(sequences, tokens // 2) if mixed else 0
        sizes = [*[sequences] * 3, *[tokens] * self.num_groups, decodes, decodes, chunks, chunks]
        most_shared = max(1, decodes // 2)  # tiles: each has two sequences or more
        sizes += [sequences, most_shared * self._tiling.chunk.queries, most_shared] if shared else []
        buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=self._device)
        starts, counts, begins, *rest = torch.split(buffer, sizes)
        slots, at = tuple(rest[: self.num_groups]), rest[self.num_groups :]
        longest = table_width * self.storage.layout.block_size
        splits = self._tiling.splits(decodes, longest, self._tiling.decode)
        together = self._share(at[4:], decodes, longest) if shared else None
        launches = [Tiles(at[0], at[1], 0, decodes, self._tiling.decode, splits, together)]
        if chunks:
            launches.append(Tiles(at[2], at[3], 0, tokens, self._tiling.chunk, 1))
        tables = tuple(table[:sequences] for table in self._tables)
        return TritonStep(starts, counts, begins, tables, slots, tuple(launches), buffer)

    def find_shared(self, batch: AttentionBatch) -> list[SharedPrefix] | None:
        """Return decoding sequences whose first keys are to be read together; None: that saves too little.

        Each sequence has one part of its sums more, which is written and read, and one for what it shares.
        """
        group, decodes = self._shared_group, batch.num_decodes
        if group is None or decodes < 2:
            return None
        size = self.storage.layout.block_size
        found = shared_prefixes(batch.block_tables[group][:decodes], (batch.starts[:decodes] + 1) // size)
        saved = [
            (len(rows) - 1) * blocks * size * self._token_bytes - len(rows) * self._part_bytes for rows, blocks in found
        ]
        paying = [prefix for prefix, each in zip(found, saved, strict=True) if each > 0]
        all_saved = sum(each for each in saved if each > 0)
        return paying if paying and all_saved >= decodes * self._part_bytes + LAUNCHES_BYTES else None

    def launch_shapes(self) -> list[tuple[Tile, bool, bool]]:
        """Return all that `Tiles.shape` may be."""
        shapes = [(tile, split, False) for tile in (self._tiling.decode, self._tiling.chunk) for split in (False, True)]
        if self._shared_group is not None:
            shapes.append((self._tiling.decode, True, True))
        return shapes

    def warm_up_step(self) -> TritonStep:
        """Prepare a step of `WARM_UP_TOKENS` that are stored nowhere and attend to nothing, with every launch shape."""
        zero = np.zeros(1, np.int32)
        slots = [np.full(WARM_UP_TOKENS, -1, np.int32)] * self.num_groups
        tables = [zero[None]] * self.num_groups
        shared = [zero, np.full(self._tiling.chunk.queries, -1, np.int32), zero]
        starts, counts, begins, *rest = self._carry([zero, zero, zero, *slots, *tables, zero, zero, *shared])
        there, of, (sequences, firsts, *at) = _cut(rest, self.num_groups)
        launches = (
            Tiles(
                sequences, firsts, 0, WARM_UP_TOKENS, tile, 1 + split,
                self._share(at, WARM_UP_TOKENS, 1) if is_shared else None,
            )
            for tile, split, is_shared in self.launch_shapes()
        )  # fmt: skip
        return TritonStep(starts, counts, begins, of, there, tuple(launches))

    def refill(self, step: TritonStep, batch: AttentionBatch) -> None:
        """Fill a reserved step with this batch, which was padded to its sequences and tokens: sequences without tokens
        (count 0) come last and attend to nothing, and tokens with slot -1 are not stored. Block tables may be narrower
        than reserved."""
        self.refill_shared(step, batch, None)

    def refill_shared(self, step: TritonStep, batch: AttentionBatch, shared: list[SharedPrefix] | None) -> None:
        """As `refill`, with what `find_shared` found."""
        assert step.buffer is not None, "only a reserved step is filled again"
        last = len(batch.starts) - 1
        parts = _ranges(batch)
        decodes = _arange(batch.num_decodes)
        tiles = [(decodes, np.zeros_like(decodes)), self._chunk_tiles(batch)]
        for launch, (sequences, firsts) in zip(step.launches, tiles, strict=False):
            more = launch.count - len(sequences)
            parts += [np.pad(sequences, (0, more), constant_values=last), np.pad(firsts, (0, more))]
        if (together := step.launches[0].shared) is not None:
            parts += self._shared_tiles(shared or [], len(batch.starts), len(together.tile_keys))
        used = int(np.count_nonzero(batch.counts))
        whole, *tables = self._carry([np.concatenate(parts), *(table[:used] for table in batch.block_tables)])
        step.buffer.copy_(whole)
        for into, table in zip(step.tables, tables, strict=True):
            into[:used, : table.shape[1]].copy_(table)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: TritonStep,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if self.storage.layout.latent_dim:
            v = k
        if k is not None and v is not None:
            k, v = (part if _is_contiguous(part) else part.contiguous() for part in (k, v))
            self._store(layer, k, v, step.slots[self.storage.group_of[layer]])
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(*q.shape[:2], self.storage.layout.value_dim, dtype=q.dtype, device=q.device)
        for tiles in step.launches:
            self._launch(layer, q, scale, step, tiles, sinks, out)
        return out

    def block_tensors(self, group: int) -> list[Tensor]:
        return self.storage.block_tensors(group)

    def layer_cache(self, layer: int, step: TritonStep) -> LayerCache | None:
        """See `AttentionBackend.layer_cache`; latent vectors are stored by `attend` alone."""
        storage = self.storage
        if storage.layout.latent_dim:
            return None
        return storage.layer_cache(layer, step.slots[storage.group_of[layer]])

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        self.storage.copy(group, copies)

    def _store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        storage, layout = self.storage, self.storage.layout
        keys, values, width = storage.keys[layer], storage.values[layer], storage.token_width
        if not storage.key_scales:
            store_tokens[(len(k),)](
                k, v, keys, values, slots, k.stride(0), v.stride(0), WIDTH=width, COLUMNS=triton.next_power_of_2(width),
                LATENT=layout.latent_dim > 0,
            )  # fmt: skip
            return
        store_tokens_scaled[(len(k),)](
            k, v, keys, values, storage.key_scales[layer], storage.value_scales[layer], slots, k.stride(0), v.stride(0),
            KV_HEADS=layout.num_kv_heads, HEADS=triton.next_power_of_2(layout.num_kv_heads), HEAD_DIM=layout.head_dim,
            DIMS=triton.next_power_of_2(layout.head_dim), BY_HAND=self._upcast, LATENT=layout.latent_dim > 0,
        )  # fmt: skip

    def _launch(
        self, layer: int, q: Tensor, scale: float, step: TritonStep, tiles: Tiles, sinks: Tensor | None, out: Tensor
    ) -> None:
        storage, layout = self.storage, self.storage.layout
        kv_heads, parts = layout.num_kv_heads, layout.num_kv_heads * self._tiling.parts
        rows = tiles.tokens * q.shape[1]
        shared = tiles.shared
        if shared is not None and shared.group != storage.group_of[layer]:
            shared = None
        into = log_sums = out
        all_splits = tiles.splits + (shared.splits if shared is not None else 0)
        if all_splits > 1:
            into = torch.empty(all_splits * rows * out.shape[2], dtype=torch.float32, device=q.device)
            log_sums = torch.empty(all_splits * rows, dtype=torch.float32, device=q.device)
        keys, values = storage.keys[layer], storage.values[layer]
        scaled = bool(storage.key_scales)
        key_scales, value_scales = (
            (storage.key_scales[layer], storage.value_scales[layer]) if scaled else (keys, values)
        )
        table = step.tables[storage.group_of[layer]]
        stored = keys, values, key_scales, value_scales
        shared_keys = step.counts if shared is None else shared.keys
        strides = scale * math.log2(math.e), q.stride(0), q.stride(1), table.stride(0)
        tiling, tile = self._tiling, tiles.tile
        shape = {
            "KV_HEADS": kv_heads, "SHARING": tiling.sharing, "HEADS": tiling.heads, "PARTS": tiling.parts,
            "VALUE_DIM": layout.value_dim, "DIMS": tiling.dims,
        }  # fmt: skip
        form = {
            "HEAD_DIM": layout.head_dim, "RESTS": tiling.rests, "BLOCK_SIZE": layout.block_size, "SCALED": scaled,
            "NARROW": scaled and q.dtype.itemsize == 2, "UPCAST": self._upcast, "LATENT": layout.latent_dim > 0,
        }  # fmt: skip
        attend_tiles[(tiles.count, parts, tiles.splits)](
            q, *stored, keys if sinks is None else sinks, into, log_sums, table, step.starts, step.counts, step.begins,
            shared_keys, tiles.sequences, tiles.firsts, *strides, tiles.first_token, rows, QUERIES=tile.queries,
            WINDOW=storage.window_of[layer] or 0, COLUMNS=tile.columns, SPLIT=all_splits > 1, SINKS=sinks is not None,
            SHARED=shared is not None, HALVED=tile.halved and form["NARROW"], num_stages=tile.stages,
            num_warps=tile.warps, **shape, **form,
        )  # fmt: skip
        if shared is not None:
            tile = tiling.shared
            attend_shared[(len(shared.tile_keys), parts, shared.splits)](
                q, *stored, into, log_sums, table, shared.rows, shared.tile_keys, *strides, tiles.splits, rows,
                QUERIES=tile.queries, COLUMNS=tile.columns, num_stages=tile.stages, num_warps=tile.warps,
                **shape, **form,
            )  # fmt: skip
        if all_splits > 1:
            join_splits[(tiles.count, parts)](
                into, log_sums, out, step.counts, step.begins, shared_keys, tiles.sequences, tiles.firsts,
                tiles.first_token, rows, tiles.splits, all_splits - tiles.splits, QUERIES=tiles.tile.queries,
                SHARED=shared is not None, **shape,
            )  # fmt: skip

    def _chunk_tiles(self, batch: AttentionBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Sequences and first queries of the chunks' tiles."""
        counts = batch.counts[batch.num_decodes :]
        each = -(-counts // self._tiling.chunk.queries)
        sequences = np.repeat(np.arange(batch.num_decodes, len(batch.counts)), each)
        at = np.arange(len(sequences)) - np.repeat(np.cumsum(each) - each, each)
        return sequences.astype(np.int32), (at * self._tiling.chunk.queries).astype(np.int32)

    def _shared_tiles(
        self, prefixes: list[SharedPrefix], sequences: int, tiles: int | None = None
    ) -> list[NDArray[np.int32]]:
        """Keys, rows and tile_keys of `SharedTiles`, of so many tiles; None: of as many as are used."""
        keys, queries = np.zeros(sequences, np.int32), self._tiling.chunk.queries
        used = []
        for rows, blocks in prefixes:
            # Of a tile with a single sequence, that one reads all of its keys itself.
            own = [part for at in range(0, len(rows), queries) if len(part := rows[at : at + queries]) > 1]
            keys[np.concatenate(own)] = blocks * self.storage.layout.block_size
            used += own
        tiles = len(used) if tiles is None else tiles
        lines, tile_keys = np.full((tiles, queries), -1, np.int32), np.zeros(tiles, np.int32)
        for index, part in enumerate(used):
            lines[index, : len(part)] = part
            tile_keys[index] = keys[part[0]]
        return [keys, lines.reshape(-1), tile_keys]

    def _share(self, at: Sequence[Tensor], decodes: int, longest: int) -> SharedTiles:
        """The launch over `_shared_tiles`, of sequences that share `longest` keys at most. All tiles have as many
        programs as if all sequences shared one prefix."""
        assert self._shared_group is not None
        splits = self._tiling.splits(-(-decodes // self._tiling.chunk.queries), longest, self._tiling.shared)
        keys, rows, tile_keys = at
        return SharedTiles(keys, rows, tile_keys, splits, self._shared_group)

    def _carry(self, parts: list[NDArray[np.int32]]) -> list[Tensor]:
        """Copy the arrays to the device in one copy."""
        whole = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        if self._device.type == "cuda":
            whole = whole.pin_memory().to(self._device, non_blocking=True)
        flat = torch.split(whole, [part.size for part in parts])
        return [there.view(part.shape) for there, part in zip(flat, parts, strict=True)]


def _ranges(batch: AttentionBatch) -> list[NDArray[np.int32]]:
    """Starts, counts, first rows, and the slots of each group."""
    begins = (np.cumsum(batch.counts) - batch.counts).astype(np.int32)
    return [batch.starts, batch.counts, begins, *(slots.astype(np.int32) for slots in batch.slot_mapping)]


def _cut(parts: list[Tensor], groups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor]]:
    """Slots and tables of each group, and the rest."""
    return tuple(parts[:groups]), tuple(parts[groups : 2 * groups]), parts[2 * groups :]


def _arange(count: int) -> NDArray[np.int32]:
    return np.arange(count, dtype=np.int32)


def _is_contiguous(part: Tensor) -> bool:
    """Whether a token's [kv_heads, head_dim] is contiguous."""
    return part.stride(2) == 1 and part.stride(1) == part.shape[2]
