"""A rank's decoder: the fused decoder over its shard of the weights, with the sums over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Quantize
from engine.expert_load import ExpertLoad
from engine.models.base import CausalModel
from engine.models.decoder import DecoderSpec, FusedDecoder
from engine.models.decoder_builder import TorchBuilder, Use
from engine.models.experts import ExpertLinear, Experts, Mlp
from engine.parallel.process_group import RankGroup
from engine.parallel.sharding import Share
from engine.quant.base import Fp8Input, Fp8Rows, Linear, fp8_input, product
from engine.quant.weight import QWeight


class SummedLinear:
    """A row-parallel product: its input is sharded over the ranks, its output is the sum of theirs."""

    __slots__ = ("_group", "_part", "in_features", "out_features")

    def __init__(self, part: Linear, group: RankGroup) -> None:
        self.in_features, self.out_features = part.in_features, part.out_features
        self._part = part
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self._part(x))

    @property
    def fp8_input(self) -> Fp8Input | None:
        """See `Fp8Linear`: as its part."""
        return fp8_input(self._part)

    def multiply(self, rows: Fp8Rows) -> Tensor:
        """See `Fp8Linear`."""
        return self._group.sum(product(self._part, rows))


class GatheredLinear:
    """A column-parallel product whose output is gathered by all ranks: `width` features of each rank, and the remainder
    of `out_features` of the last one."""

    __slots__ = ("_group", "_part", "_width", "in_features", "out_features")

    def __init__(self, part: Linear, group: RankGroup, width: int, out_features: int) -> None:
        self.in_features, self.out_features = part.in_features, out_features
        self._part = part
        self._group = group
        self._width = width

    def __call__(self, x: Tensor) -> Tensor:
        part = self._part(x)
        if part.shape[1] < self._width:
            part = F.pad(part, (0, self._width - part.shape[1]))
        whole = self._group.gather(part).transpose(0, 1).reshape(len(x), -1)
        return whole[:, : self.out_features].contiguous()


class RankDecoder(FusedDecoder):
    """A `CausalModel` whose forward pass all ranks run together, in step. Hidden states and logits are whole on each
    of them.

    Attributes:
        whole: the whole model's spec. `spec` equals it except for the heads, which are the rank's own, as its cache is.
    """

    def __init__(self, share: Share, dtype: torch.dtype, group: RankGroup, **parts: Any) -> None:
        super().__init__(share.local, dtype, **parts)
        local = self._spec
        self.whole = share.spec.model_spec(dtype)
        self._spec = replace(
            self.whole, num_heads=local.num_heads, num_kv_heads=local.num_kv_heads, kv_shapes=local.kv_shapes
        )
        self._tokens = share.vocabulary
        self._group = group
        mixtures = ((index, layer.mixture) for index, layer in enumerate(self._layers))
        self._expert_rows = {
            index: mixture.rows
            for index, mixture in mixtures
            if isinstance(mixture, Experts) and mixture.rows is not None
        }
        self._expert_ranks = np.array(share.expert_ranks) if self._expert_rows else None

    def expert_load(self) -> ExpertLoad | None:
        """See `RoutedModel.expert_load`: of all ranks' experts, counted where each rank has whole ones."""
        if self._expert_ranks is None:
            return None
        rows = np.zeros(self._expert_ranks.shape, dtype=np.int64)
        # One copy from the device, not one for each layer.
        rows[list(self._expert_rows)] = torch.stack(list(self._expert_rows.values())).cpu().numpy()
        return ExpertLoad(rows, self._expert_ranks)

    def reset_expert_load(self) -> None:
        """See `RoutedModel.reset_expert_load`."""
        for rows in self._expert_rows.values():
            rows.zero_()

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Sum the embeddings: each token's row is on one rank; the others add zeros, so nothing is rounded."""
        here = input_ids - self._tokens.first
        elsewhere = (here < 0) | (here >= self._tokens.end - self._tokens.first)
        hidden = super()._embed(here.masked_fill(elsewhere, 0))
        return self._group.sum(hidden.masked_fill_(elsewhere[:, None], 0))

    def _mixture(self, mlp: Experts, x: Tensor, routed: Tensor) -> Tensor:
        """Each rank has a slice of every expert, or some experts, and routes as the others do: one sum completes a
        mixture."""
        return self._group.sum(super()._mixture(mlp, x, routed))


@dataclass(frozen=True, slots=True)
class RankBuilder:
    """Makes a rank's decoder, of torch's operators."""

    share: Share
    group: RankGroup
    inner: TorchBuilder

    @property
    def quantize(self) -> Quantize:
        return self.inner.quantize

    def runs(self, weight: QWeight, use: Use) -> bool:
        return self.inner.runs(weight, use)

    def linear(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        return self.inner.linear(weight, bias)

    def gated(self, weight: Tensor | QWeight, bias: Tensor | None) -> Linear:
        return self.inner.gated(weight, bias)

    def experts(
        self, weights: Sequence[Tensor | QWeight], biases: Sequence[Tensor | None], *, gated: bool
    ) -> ExpertLinear:
        return self.inner.experts(weights, biases, gated=gated)

    def head(self, weight: Tensor | QWeight) -> Linear:
        return self._gathered(self.inner.head(weight))

    def tied_head(self, embedding: Tensor | QWeight) -> Linear:
        return self._gathered(self.inner.tied_head(embedding))

    def decoder(self, spec: DecoderSpec, dtype: torch.dtype, **parts: Any) -> CausalModel:
        layers = tuple(
            replace(layer, output=SummedLinear(layer.output, self.group), mlp=self._summed(layer.mlp))
            for layer in parts.pop("layers")
        )
        return RankDecoder(self.share, dtype, self.group, layers=layers, **parts)

    def _summed(self, mlp: Mlp | Experts) -> Mlp | Experts:
        """A mixture is summed as a whole (`RankDecoder`)."""
        return replace(mlp, down=SummedLinear(mlp.down, self.group)) if isinstance(mlp, Mlp) else mlp

    def _gathered(self, part: Linear) -> Linear:
        return GatheredLinear(part, self.group, self.share.vocabulary_width, self.share.spec.vocab_size)
