"""Paged attention by our own Triton kernels: the default on a GPU, and on any that Triton knows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch, KVLayout
from engine.attention.storage import KVStorage
from engine.triton_kernels.attention import attend_tiles, join_splits, store_tokens

FP8 = torch.float8_e4m3fn

DECODE_COLUMNS, CHUNK_COLUMNS = 64, 64
"""Keys that a program takes a turn."""

CHUNK_ROWS = 64
"""Queries times heads of a chunk's tile, at least."""

LEAST_ROWS = 16
"""Of a product, which the matrix units want."""

MOST_SPLITS = 16
SPLIT_KEYS = 256
"""Keys that a split should have at least: less isn't worth a second kernel."""

_SEQUENCE_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Tiles:
    """A launch: int32 [tiles] sequences and first queries of the programs, and how they are cut."""

    sequences: Tensor
    firsts: Tensor
    queries: int
    columns: int
    splits: int

    @property
    def count(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step's ranges on the device.

    Attributes:
        starts, counts, begins: int32 [B].
        tables, slots: per cache group int32 [B, width] and int32 [T].
        launches: decoding sequences, then chunks; either may be missing.
    """

    starts: Tensor
    counts: Tensor
    begins: Tensor
    tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    launches: tuple[Tiles, ...]


class TritonPagedAttention:
    """Attention by Triton kernels over blocks of any size.

    Args:
        dtype: of the cache: that of q, or float8_e4m3fn, whose values are cut off at 448 and have no scale.
        upcast: multiply in float32 (Triton's interpreter gets products of bfloat16 wrong).
        processors: of the device, which thin batches are spread over; None: as it says.
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
    ) -> None:
        self.storage = KVStorage(layout, dtype, device)
        self._device = device
        self._upcast = upcast
        self._largest = torch.finfo(dtype).max if dtype == FP8 else 0.0
        self._sharing = max(1, (layout.num_heads or layout.num_kv_heads) // layout.num_kv_heads)
        self._heads = triton.next_power_of_2(self._sharing)
        self._dims = max(16, triton.next_power_of_2(layout.head_dim))
        self._decode_queries = max(1, LEAST_ROWS // self._heads)
        self._chunk_queries = max(self._decode_queries, CHUNK_ROWS // self._heads)
        if processors is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._processors = processors

    def prepare(self, batch: AttentionBatch) -> TritonStep:
        begins = np.cumsum(batch.counts) - batch.counts
        decodes = np.arange(batch.num_decodes)
        parts: list[NDArray[np.int32]] = [batch.starts, batch.counts, begins.astype(np.int32)]
        parts += [*batch.block_tables, *(slots.astype(np.int32) for slots in batch.slot_mapping)]
        parts += [decodes.astype(np.int32), np.zeros(len(decodes), np.int32)]
        sequences, firsts = self._chunk_tiles(batch)
        parts += [sequences, firsts]
        device = iter(self._carry(parts))
        starts, counts, first_rows = (next(device) for _ in range(_SEQUENCE_COLUMNS))
        groups = len(batch.block_tables)
        tables = tuple(next(device) for _ in range(groups))
        slots = tuple(next(device) for _ in range(groups))
        launches = []
        if len(decodes):
            splits = self._splits(batch)
            launches.append(Tiles(next(device), next(device), self._decode_queries, DECODE_COLUMNS, splits))
        else:
            next(device), next(device)
        if len(sequences):
            launches.append(Tiles(next(device), next(device), self._chunk_queries, CHUNK_COLUMNS, 1))
        return TritonStep(starts, counts, first_rows, tables, slots, tuple(launches))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, step: TritonStep) -> Tensor:
        storage = self.storage
        layout = storage.layout
        group = storage.group_of[layer]
        width = storage.token_width
        k, v = (part if _lies_together(part) else part.contiguous() for part in (k, v))
        store_tokens[(len(q),)](
            k, v, storage.keys[layer], storage.values[layer], step.slots[group], k.stride(0), v.stride(0),
            WIDTH=width, COLUMNS=triton.next_power_of_2(width), LARGEST=self._largest,
        )  # fmt: skip
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tiles in step.launches:
            self._launch(layer, q, scale, step, tiles, out, layout.num_kv_heads)
        return out

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def _launch(
        self, layer: int, q: Tensor, scale: float, step: TritonStep, tiles: Tiles, out: Tensor, kv_heads: int
    ) -> None:
        storage = self.storage
        group = storage.group_of[layer]
        rows = q.shape[0] * q.shape[1]
        if tiles.splits > 1:
            # Decoding sequences stand first, so that only their rows have parts.
            rows = tiles.count * q.shape[1]
            into = torch.empty(tiles.splits * rows * q.shape[2], dtype=torch.float32, device=q.device)
            log_sums = torch.empty(tiles.splits * rows, dtype=torch.float32, device=q.device)
        else:
            into = log_sums = out
        table = step.tables[group]
        attend_tiles[(tiles.count, kv_heads, tiles.splits)](
            q, storage.keys[layer], storage.values[layer], into, log_sums, table,
            step.starts, step.counts, step.begins, tiles.sequences, tiles.firsts,
            scale * math.log2(math.e), q.stride(0), q.stride(1), table.stride(0), rows,
            KV_HEADS=kv_heads, SHARING=self._sharing, HEADS=self._heads, HEAD_DIM=q.shape[2], DIMS=self._dims,
            BLOCK_SIZE=storage.layout.block_size, WINDOW=storage.window_of[layer] or 0, QUERIES=tiles.queries,
            COLUMNS=tiles.columns, SPLITS=tiles.splits, UPCAST=self._upcast,
        )  # fmt: skip
        if tiles.splits > 1:
            join_splits[(rows,)](
                into, log_sums, out, rows, HEAD_DIM=q.shape[2], DIMS=self._dims, SPLITS=tiles.splits
            )  # fmt: skip

    def _splits(self, batch: AttentionBatch) -> int:
        """Among how many programs the keys of each decoding sequence are split: a power of two."""
        programs = batch.num_decodes * self.storage.layout.num_kv_heads
        longest = int(batch.starts[: batch.num_decodes].max()) + 1
        wanted = min(2 * self._processors // max(1, programs), longest // SPLIT_KEYS, MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)

    def _chunk_tiles(self, batch: AttentionBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Sequences and first queries of the chunks' tiles."""
        counts = batch.counts[batch.num_decodes :]
        each = -(-counts // self._chunk_queries)
        sequences = np.repeat(np.arange(batch.num_decodes, len(batch.counts)), each)
        at = np.arange(len(sequences)) - np.repeat(np.cumsum(each) - each, each)
        return sequences.astype(np.int32), (at * self._chunk_queries).astype(np.int32)

    def _carry(self, parts: list[NDArray[np.int32]]) -> list[Tensor]:
        """The arrays on the device, by one copy."""
        whole = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        if self._device.type == "cuda":
            whole = whole.pin_memory().to(self._device, non_blocking=True)
        flat = torch.split(whole, [part.size for part in parts])
        return [there.view(part.shape) for there, part in zip(flat, parts, strict=True)]


def _lies_together(part: Tensor) -> bool:
    """Whether a token's [kv_heads, head_dim] is one run of memory."""
    return part.stride(2) == 1 and part.stride(1) == part.shape[2]
