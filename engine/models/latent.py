"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values of all heads are products
with one short vector of a token, and only that vector is cached.

It is computed in the absorbed form: a head's score q . (W_UK c) is (W_UK^T q) . c, so the heads attend to the vectors
themselves, as if these were the one key-value head of a model with long heads, and W_UV is applied to what they
attended. A head's key ends in a part that is rotated, which all heads share and which is cached behind the vector;
values are the keys' first elements, so that backends store them once (`KVLayout.latent_dim`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.base import Attend
from engine.models.rope import Rotation
from engine.quant.base import Linear

_EPS = 1e-6
"""Of the latent vectors' norms, whatever the config says of the others."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of latent attention.

    Attributes:
        query_rank: elements of the vector that all heads' queries are made from; None: they are made from the input.
        rank: of the vector that all heads' keys and values are made from.
        plain_dim, rotated_dim: elements of a head's query and key that don't turn with the position, and those behind
            them that do.
        value_dim: elements of a head's value.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Elements of a token's cache line."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query, as checkpoints have it."""
        return self.plain_dim + self.rotated_dim

    def num_parameters(self, hidden_size: int, heads: int, *, bias: bool) -> int:
        """Weights of a layer's attention but for the output's. `bias`: of the products with the input."""
        queries = heads * self.query_dim
        if self.query_rank is None:
            made = hidden_size * queries
        else:
            made = self.query_rank * (hidden_size + bias + 1 + queries)
        expanded = self.rank * (1 + heads * (self.plain_dim + self.value_dim))
        return made + (hidden_size + bias) * self.key_dim + expanded


class HeadProduct(Protocol):
    """A product of each head with a weight of its own."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, heads, in_features] -> [T, heads, out_features]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BatchedProduct:
    """A `HeadProduct` of torch's operators.

    Attributes:
        weight: [heads, in_features, out_features].
    """

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """See `HeadProduct`."""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """The weights that make a layer's queries and cache lines. Checkpoints' rotated dimensions are sorted, see
    `engine.models.head_order`.

    Attributes:
        down: hidden -> query_rank + key_dim, or heads * query_dim + key_dim without a query_rank.
        query_norm: float32 [query_rank].  queries: query_rank -> heads * query_dim. None: there is no query_rank.
        norm: float32 [rank].
        keys: W_UK, of each head plain_dim -> rank.  values: W_UV, rank -> value_dim.
    """

    down: Linear
    norm: Tensor
    keys: HeadProduct
    values: HeadProduct
    query_norm: Tensor | None = None
    queries: Linear | None = None

    def attended(
        self, spec: LatentSpec, layer: int, x: Tensor, rotation: Rotation, growth: Tensor | None, scale: float,
        attend: Attend,
    ) -> Tensor:  # fmt: skip
        """[T, hidden_size], normed -> [T, heads, value_dim]; growth: of queries [T, 1, 1]."""
        made = self.down(x)
        sizes = [made.shape[1] - spec.key_dim, spec.rank, spec.rotated_dim]
        query, latent, turning = torch.split(made, sizes, dim=1)
        if self.queries is not None:
            query = self.queries(_normed(query, self.query_norm))
        query = query.reshape(len(x), -1, spec.query_dim)
        turned = rotation.apply(torch.cat((query[..., spec.plain_dim :], turning.unsqueeze(1)), dim=1))
        q = torch.cat((self.keys(query[..., : spec.plain_dim]), turned[:, :-1]), dim=-1)
        q = q if growth is None else (q * growth).to(q.dtype)
        k = torch.cat((_normed(latent, self.norm).unsqueeze(1), turned[:, -1:]), dim=-1)
        return self.values(attend(layer, q, k, k[..., : spec.rank], scale))


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return F.rms_norm(x.float(), weight.shape, weight, _EPS).to(x.dtype)
