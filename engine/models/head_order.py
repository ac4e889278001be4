"""The order of a head's dimensions: that of checkpoints, and that in which a decoder rotates them.

A decoder rotates dimension i with i + head_dim / 2, the rotated pairs first. Checkpoints have all rotated dimensions
first, the two of a pair half of them apart or next to each other. Scores don't depend on the order, so the rows of
q and k are sorted once, when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.decoder import DecoderSpec


def head_order(spec: DecoderSpec, layer: int) -> Tensor | None:
    """Where the decoder's dimensions of a head lie in the checkpoint, int64 [head_dim]; None: in the same order."""
    passing = spec.ropes[spec.layer_ropes[layer]].passing
    rotated = spec.head_dim - 2 * passing
    if rotated in (0, spec.head_dim) and not spec.interleaved_rope:
        return None
    turning, rest = torch.arange(rotated), torch.arange(rotated, spec.head_dim)
    first, second = (turning[::2], turning[1::2]) if spec.interleaved_rope else turning.tensor_split(2)
    return torch.cat((first, rest[:passing], second, rest[passing:]))


def qkv_order(spec: DecoderSpec, layer: int) -> Tensor | None:
    """Likewise the rows of q, k and v, and of gates behind all of them, stacked."""
    order = head_order(spec, layer)
    if order is None and not spec.gated_attention:
        return None
    as_stored = torch.arange(spec.head_dim)
    heads = torch.arange(sum(spec.qkv_rows.values()) // spec.head_dim)[:, None] * spec.head_dim
    queries, keys, values = heads.tensor_split((-2 * spec.num_kv_heads, -spec.num_kv_heads))
    gates = queries[:0]
    if spec.gated_attention:  # each stands behind its query
        queries, gates = queries[::2], queries[1::2]
    rotated = torch.cat((queries, keys)) + (as_stored if order is None else order)
    return torch.cat((rotated, torch.cat((values, gates)) + as_stored)).flatten()


def latent_order(parts: Sequence[tuple[int, int, int]], *, interleaved: bool) -> Tensor | None:
    """Likewise the stacked rows of latent attention's products. `parts`: heads, rows of each, and how many of these
    (the last ones) are rotated. `interleaved`: as of `DecoderSpec`."""
    if not interleaved:
        return None
    orders, first = [], 0
    for heads, rows, rotated in parts:
        plain, turning = torch.arange(rows).tensor_split((rows - rotated,))
        starts = first + torch.arange(heads)[:, None] * rows
        orders.append((starts + torch.cat((plain, turning[::2], turning[1::2]))).flatten())
        first += heads * rows
    return torch.cat(orders)
