"""The reference backend: one sequence at a time, float32, by the definition (Vaswani et al. 2017, section 3.2.1).

It is not optimised; every other backend is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBatch, KVLayout
from engine.attention.storage import KVStorage
from engine.plan import BlockCopy


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """The step's batch, with its slots as tensors."""

    batch: AttentionBatch
    slots: tuple[Tensor, ...]


class ReferenceAttention:
    """Attention by definition, over the same paged storage as the fast backends."""

    name = "reference"

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.storage = KVStorage(layout, dtype, device)
        self._device = device

    def prepare(self, batch: AttentionBatch) -> ReferenceStep:
        return ReferenceStep(batch, tuple(torch.from_numpy(s).to(self._device) for s in batch.slot_mapping))

    @property
    def num_groups(self) -> int:
        """See `CapturableAttention`."""
        return len(self.storage.layout.groups)

    def reserve(self, tokens: int, sequences: int, decodes: int, mixed: bool, table_width: int) -> ReferenceStep:
        """See `CapturableAttention`."""
        groups = range(self.num_groups)
        batch = AttentionBatch(
            np.zeros(sequences, np.int32), np.zeros(sequences, np.int32), 0,
            tuple(np.zeros((sequences, table_width), np.int32) for _ in groups),
            tuple(np.zeros(tokens, np.int64) for _ in groups),
        )  # fmt: skip
        return self.prepare(batch)

    def refill(self, step: ReferenceStep, batch: AttentionBatch) -> None:
        """See `CapturableAttention`. Padding tokens are written to block 0, which is never read."""
        step.batch.starts[:], step.batch.counts[:] = batch.starts, batch.counts
        for into, table in zip(step.batch.block_tables, batch.block_tables, strict=True):
            into[:, : table.shape[1]] = table
        for there, slots in zip(step.slots, batch.slot_mapping, strict=True):
            there.copy_(torch.from_numpy(np.maximum(slots, 0)))

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: ReferenceStep,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        storage, batch = self.storage, step.batch
        group, window = storage.group_of[layer], storage.window_of[layer]
        layout = storage.layout
        storage.write(layer, k, v, step.slots[group])
        out = q.new_empty(*q.shape[:2], layout.value_dim)
        end = 0
        for i, (start, count) in enumerate(zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)):
            if not count:  # padding of a captured step
                continue
            begin, end = end, end + count
            length = start + count
            table = torch.from_numpy(batch.block_tables[group][i, : -(-length // layout.block_size)]).to(self._device)
            shape = (-1, layout.num_kv_heads, layout.head_dim)
            keys = storage.keys[layer][table].view(shape)[:length].float()
            values = storage.values[layer][table].view(shape)[:length, :, : layout.value_dim].float()
            heads_per_kv = q.shape[1] // layout.num_kv_heads
            keys = keys.repeat_interleave(heads_per_kv, dim=1)
            values = values.repeat_interleave(heads_per_kv, dim=1)
            query_at = torch.arange(start, length, device=self._device)[:, None]
            key_at = torch.arange(length, device=self._device)[None, :]
            visible = key_at <= query_at
            if window is not None:
                visible &= key_at > query_at - window
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * scale
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :length]
            # A hidden key may be an unused or freed slot; its value must not enter even as 0 * NaN.
            values = values.masked_fill(~visible.any(dim=0)[:, None, None], 0.0)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out

    def block_tensors(self, group: int) -> list[Tensor]:
        return self.storage.block_tensors(group)

    def layer_cache(self, layer: int, step: object) -> None:
        """`attend` stores keys and values itself."""

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        self.storage.copy(group, copies)
