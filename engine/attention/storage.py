"""The paged cache's tensors: for each layer, K and V as [num_blocks, block_size, kv_heads, head_dim]; of a layout with
`latent_dim` K alone.

Zero-initialised: kernels may read the unused tail of a sequence's last block, and 0 * NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import KVLayout
from engine.device_transfer import make_transfer
from engine.models.base import LayerCache
from engine.plan import BlockCopy
from engine.zeros import zeros


class KVStorage:
    """K and V of every layer, by layer index.

    Attributes:
        keys, values: per layer [num_blocks, block_size * kv_heads * head_dim], contiguous; the same tensors with
            `KVLayout.latent_dim`.
        key_scales, value_scales: per layer float32 [num_blocks, block_size * kv_heads]; of a float8 cache only.
        group_of: per layer, the index of its cache group.
        window_of: per layer, its sliding window in tokens, or None.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self._transfer = make_transfer(device)
        num_layers = layout.num_layers
        width = layout.num_kv_heads * layout.head_dim
        self.token_width = width
        self.group_of = [0] * num_layers
        self.window_of: list[int | None] = [None] * num_layers
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers
        self._stores = (self.keys,) if layout.latent_dim else (self.keys, self.values)
        scaled = dtype == torch.float8_e4m3fn
        self.key_scales: list[Tensor] = [torch.empty(0)] * num_layers if scaled else []
        self.value_scales: list[Tensor] = [torch.empty(0)] * num_layers if scaled else []
        for index, group in enumerate(layout.groups):
            for layer in group.layers:
                self.group_of[layer] = index
                self.window_of[layer] = group.window
                shape = (group.num_blocks, layout.block_size * width)
                self.keys[layer] = zeros(shape, dtype, device)
                self.values[layer] = self.keys[layer] if layout.latent_dim else zeros(shape, dtype, device)
                if scaled:
                    shape = (group.num_blocks, layout.block_size * layout.num_kv_heads)
                    self.key_scales[layer] = zeros(shape, torch.float32, device)
                    self.value_scales[layer] = (
                        self.key_scales[layer] if layout.latent_dim else zeros(shape, torch.float32, device)
                    )

    def write(self, layer: int, k: Tensor | None, v: Tensor | None, slots: Tensor) -> None:
        """Store k and v [T, kv_heads, head_dim] at `slots` int64 [T]; of a layout with `latent_dim` v is in k. None:
        nothing is stored."""
        width = self.token_width
        if k is not None:
            self.keys[layer].view(-1, width).index_copy_(0, slots, k.reshape(-1, width))
        if v is not None and not self.layout.latent_dim:
            self.values[layer].view(-1, width).index_copy_(0, slots, v.reshape(-1, width))

    def layer_cache(self, layer: int, slots: Tensor) -> LayerCache:
        """A layer's part, with a step's `slots` [T]; of a layout without `latent_dim`."""
        key_scales, value_scales = (
            stored[layer] if stored else None for stored in (self.key_scales, self.value_scales)
        )
        return LayerCache(self.keys[layer], self.values[layer], key_scales, value_scales, slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, kv_heads, head_dim] at `slots` int64 [T]."""
        shape = (-1, self.layout.num_kv_heads, self.layout.head_dim)
        keys, values = (stored[layer].view(shape).index_select(0, slots) for stored in (self.keys, self.values))
        return keys, values

    def block_tensors(self, group: int) -> list[Tensor]:
        """See `AttentionBackend.block_tensors`."""
        stores = (*self._stores, *filter(None, (self.key_scales, self.value_scales)[: len(self._stores)]))
        return [stored[layer] for layer in self.layout.groups[group].layers for stored in stores]

    def zero(self, group: int, blocks: list[int]) -> None:
        """Zero these blocks in all layers of the group."""
        (index,) = self._transfer.up(np.array(blocks, dtype=np.int64))
        for layer in self.layout.groups[group].layers:
            for stored in self._stores:
                # Bytes of zeros are zeros of any dtype; torch fills no float8 by index on a CPU.
                stored[layer].view(torch.uint8).index_fill_(0, index, 0)
            for scales in (self.key_scales, self.value_scales):
                if scales:
                    scales[layer].index_fill_(0, index, 0)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """Copy the first positions of blocks in all layers of the group."""
        size = self.layout.block_size
        slots = (
            np.concatenate([at * size + np.arange(tokens, dtype=np.int64) for at, tokens in blocks])
            for blocks in ([(one.source, one.tokens) for one in copies], [(one.target, one.tokens) for one in copies])
        )
        sources, targets = self._transfer.up(*slots)
        for layer in self.layout.groups[group].layers:
            for stored in (*self._stores, *filter(None, (self.key_scales, self.value_scales))):
                # torch copies no float8 by index on a CPU.
                whole = stored[layer].view(torch.uint8) if stored[layer].itemsize == 1 else stored[layer]
                tokens = whole.view(len(whole) * size, -1)
                tokens.index_copy_(0, targets, tokens.index_select(0, sources))
