"""A rank's decoder: the fused decoder over its shard of the weights, with the sums over the ranks of its stage. Hidden
states go from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter
from engine.adapters.linear import TorchAdapter
from engine.adapters.targets import Product
from engine.attention import AttentionBackend, AttentionBatch
from engine.config import Quantize
from engine.expert_load import ExpertLoad
from engine.models.base import Attend, CausalModel
from engine.models.decoder import DecoderSpec, FusedDecoder, Layer
from engine.models.decoder_builder import TorchBuilder, Use
from engine.models.experts import ExpertLinear, Experts, Mlp
from engine.models.layer_ops import Residual
from engine.parallel.adapters import shard_adapter
from engine.parallel.pipeline import MicroBatch, micro_batches, stage_specs
from engine.parallel.process_group import RankGroup, RankGroups
from engine.parallel.sharding import Share
from engine.quant.base import Fp8Input, Fp8Rows, Linear, fp8_input, product
from engine.quant.weight import QWeight


class SummedLinear:
    """A row-parallel product: its input is sharded over the ranks, its output is the sum of theirs."""

    __slots__ = ("_group", "in_features", "out_features", "part")

    def __init__(self, part: Linear, group: RankGroup) -> None:
        self.in_features, self.out_features = part.in_features, part.out_features
        self.part = part
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self.part(x))

    @property
    def fp8_input(self) -> Fp8Input | None:
        """See `Fp8Linear`: as its part."""
        return fp8_input(self.part)

    def multiply(self, rows: Fp8Rows) -> Tensor:
        """See `Fp8Linear`."""
        return self._group.sum(product(self.part, rows))


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
    rank of the first stage; the other stages have neither.

    Attributes:
        whole: the whole model's spec. `spec` equals it except for the heads, which are the rank's own, and for the
            layers that are cached, which are its stage's.
        stage_specs: as `spec`, of the ranks of each stage.
    """

    def __init__(self, share: Share, dtype: torch.dtype, groups: RankGroups, **parts: Any) -> None:
        super().__init__(share.local, dtype, **parts)
        local = self._spec
        self.whole = share.spec.model_spec(dtype)
        own = replace(self.whole, num_heads=local.num_heads, num_kv_heads=local.num_kv_heads, kv_shapes=local.kv_shapes)
        self.stage_specs = stage_specs(own, groups.num_stages)
        self._spec = self.stage_specs[groups.stage_index]
        self._share = share
        self._tokens = share.vocabulary
        self._groups = groups
        self._group = groups.stage
        mixtures = ((index, layer.mixture) for index, layer in enumerate(self._layers))
        self._expert_rows = {
            index: mixture.rows
            for index, mixture in mixtures
            if isinstance(mixture, Experts) and mixture.rows is not None
        }
        self._expert_ranks = np.array(share.expert_ranks) if self._expert_rows else None

    @property
    def decoder_spec(self) -> DecoderSpec:
        """See `AdaptedModel.decoder_spec`: of the whole model."""
        return self._share.spec

    def add_places(self, max_loras: int, max_ranks: Mapping[Product, int]) -> None:
        """See `AdaptedModel.add_places`. An adapter's part of a row-parallel product is summed with the rank's own."""
        self._layers = tuple(_with_outputs(layer, lambda linear: linear.part) for layer in self._layers)
        super().add_places(max_loras, max_ranks)
        self._layers = tuple(_with_outputs(layer, self._summed) for layer in self._layers)

    def pack_adapter(self, adapter: Adapter) -> TorchAdapter:
        """See `AdaptedModel.pack_adapter`; of the rank's shard. Raises as `shard_adapter`, too."""
        return super().pack_adapter(shard_adapter(adapter, self._share))

    def _summed(self, part: Any) -> SummedLinear:
        return SummedLinear(part, self._group)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rope_lengths: Tensor | None) -> Tensor:
        """See `CausalModel.forward`; with several stages as one micro-batch."""
        if self._groups.num_stages == 1:
            return super().forward(input_ids, positions, attend, rope_lengths)
        parts = [MicroBatch(slice(0, len(positions)), None, lambda: attend)]
        return self._through_stages(input_ids, positions, parts, rope_lengths)

    def forward_step(
        self, input_ids: Tensor, positions: Tensor, rope_lengths: Tensor | None, batch: AttentionBatch,
        ends: NDArray[np.int32], attention: AttentionBackend, adapters: NDArray[np.int32] | None,
    ) -> Tensor:  # fmt: skip
        """Run `forward` of a step, in the micro-batches that `ends` divides it into (`divide_step`). With several
        stages only the tokens that are wanted have hidden states. `adapters`: as of `AttentionStep`."""
        parts = micro_batches(batch, ends, attention, adapters)
        if self._groups.num_stages == 1:
            (part,) = parts
            return super().forward(input_ids, positions, part.prepare(), rope_lengths)
        return self._through_stages(input_ids, positions, parts, rope_lengths)

    def _through_stages(
        self, input_ids: Tensor, positions: Tensor, parts: Sequence[MicroBatch], rope_lengths: Tensor | None
    ) -> Tensor:
        """Take micro-batches through this rank's stage, and return the last stage's hidden states [T, hidden_size] to
        the first one.

        Nothing waits for a send before all is computed, so a stage computes while its results are on their way. The
        first stage receives last: on GPUs the operations of two ranks run in the order in which they were started.
        """
        groups, spec = self._groups, self._spec
        is_first, is_last = groups.stage_index == 0, groups.stage_index == groups.num_stages - 1
        hidden = torch.empty(len(positions), spec.hidden_size, dtype=spec.dtype, device=groups.device)
        arriving = [] if is_first else [groups.whole.receive(hidden[part.tokens], groups.before) for part in parts]
        sent = []
        for index, part in enumerate(parts):
            if is_first:
                entering = input_ids[part.tokens]
            else:
                arriving[index].wait()
                entering = hidden[part.tokens]
            leaving = self.forward_stage(entering, part, positions, rope_lengths)
            if is_last:
                leaving = self._last_normed(leaving, part.wanted)
            if len(leaving):
                sent.append((leaving, groups.whole.send(leaving, groups.following)))
        if is_first:
            self._receive_wanted(hidden, parts)
        for _, operation in sent:
            operation.wait()
        return hidden

    def forward_stage(
        self, entering: Tensor, part: MicroBatch, positions: Tensor, rope_lengths: Tensor | None
    ) -> Tensor:
        """Compute the layers of this rank's stage for a micro-batch.

        Args:
            entering: int64 [T] token ids in the first stage, else hidden states [T, hidden_size], which are changed.
            positions, rope_lengths: of the whole step, as of `CausalModel.forward`.

        Returns:
            Hidden states behind the last of the layers [T, hidden_size], before any norm.
        """
        with torch.inference_mode():
            hidden = self._embed_scaled(entering) if self._groups.stage_index == 0 else entering
            lengths = None if rope_lengths is None else rope_lengths[part.tokens]
            step = self._step_parts(positions[part.tokens], part.prepare(), lengths, None)
            residual = Residual(self._ops, hidden, self._decoder.residual_scale)
            self._through(self._decoder.held_layers, residual, step, {})
            return residual.joined()

    def _last_normed(self, hidden: Tensor, wanted: NDArray[np.int32] | None) -> Tensor:
        """Return the wanted tokens' hidden states [W, hidden_size] behind the model's last norm."""
        if wanted is not None:
            (at,) = self._transfer.up(wanted.astype(np.int64))
            hidden = hidden.index_select(0, at)
        normed = self._ops.add_norm(hidden, None, self._norm)
        assert isinstance(normed, Tensor)
        return normed

    def _receive_wanted(self, hidden: Tensor, parts: Sequence[MicroBatch]) -> None:
        """Receive the last stage's hidden states of all micro-batches."""
        arriving = []
        for part in parts:
            own = hidden[part.tokens]
            into = own if part.wanted is None else own.new_empty(len(part.wanted), own.shape[1])
            if len(into):
                arriving.append((part, own, into, self._groups.whole.receive(into, self._groups.before)))
        for part, own, into, operation in arriving:
            operation.wait()
            if part.wanted is not None:
                (at,) = self._transfer.up(part.wanted.astype(np.int64))
                own.index_copy_(0, at, into)

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


def _with_outputs(layer: Layer, change: Callable[[Any], Linear]) -> Layer:
    """Return a layer with its row-parallel products changed; a mixture is summed as a whole."""
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        mlp = replace(mlp, down=change(mlp.down))
    return replace(layer, output=change(layer.output), mlp=mlp)


@dataclass(frozen=True, slots=True)
class RankBuilder:
    """Makes a rank's decoder, of torch's operators."""

    share: Share
    groups: RankGroups
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
            replace(layer, output=SummedLinear(layer.output, self.groups.stage), mlp=self._summed(layer.mlp))
            for layer in parts.pop("layers")
        )
        return RankDecoder(self.share, dtype, self.groups, layers=layers, **parts)

    def _summed(self, mlp: Mlp | Experts) -> Mlp | Experts:
        """A mixture is summed as a whole (`RankDecoder`)."""
        return replace(mlp, down=SummedLinear(mlp.down, self.groups.stage)) if isinstance(mlp, Mlp) else mlp

    def _gathered(self, part: Linear) -> Linear:
        return GatheredLinear(part, self.groups.stage, self.share.vocabulary_width, self.share.spec.vocab_size)
