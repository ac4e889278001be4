"""Inputs of a decoder's layers of their own (Gemma 3n and 4, "per-layer embeddings"): each token has a small vector for
each layer, which is looked up, and joins what is made from the token's embedding.

A layer gates its vector by its output so far, and what a product makes of that joins the residual behind the MLP. The
table is large, but a token reads one row of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.base import Linear
from engine.quant.weight import QWeight


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """The sizes.

    Attributes:
        size: elements of a token's input of one layer.  vocab_size: rows of the table, no fewer than tokens.
    """

    size: int
    vocab_size: int

    def num_parameters(self, hidden_size: int, num_layers: int, *, active: bool = False) -> int:
        """Weights. `active`: with one row of the table."""
        rows, row = 1 if active else self.vocab_size, num_layers * self.size
        of_layers = num_layers * (2 * self.size + 1) * hidden_size
        return (rows + hidden_size) * row + self.size + of_layers


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """A layer's weights.

    Attributes:
        gate: hidden -> size.  projection: size -> hidden.  norm: float32 [hidden], of what joins the residual.
    """

    gate: Linear
    projection: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Makes the inputs of all layers.

    Attributes:
        table: [vocab_size, layers * size]; rows of a quantized one are dequantized when they are looked up.
        projection: hidden -> layers * size.
        norm: float32 [size], of what the projection makes.
    """

    table: Tensor | QWeight
    projection: Linear
    norm: Tensor

    def of(self, input_ids: Tensor, embedded: Tensor, epsilon: float) -> Tensor:
        """Return [T, layers, size] of tokens int64 [T] and their scaled embeddings [T, hidden]."""
        size, dtype = len(self.norm), embedded.dtype
        looked_up = look_up(self.table, input_ids, dtype) * float(torch.tensor(size**0.5, dtype=dtype))
        made = (self.projection(embedded) * embedded.shape[1] ** -0.5).view(len(input_ids), -1, size)
        normed = F.rms_norm(made.float(), (size,), weight=self.norm, eps=epsilon).to(dtype)
        return normed.add_(looked_up.view(made.shape)).mul_(2**-0.5)


def look_up(table: Tensor | QWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows int64 [T] of a table [rows, columns], in `dtype`; a new tensor."""
    if isinstance(table, QWeight):
        return table.take(index).dequantize(dtype)
    return table.index_select(0, index)
