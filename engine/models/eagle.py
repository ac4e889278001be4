"""The head of EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): one decoder layer that reads a model's own states.

States from a low, a middle and a high layer of the model are joined to one vector by `fc`. The layer's attention reads
that vector at a position concatenated with the embedding of the token *behind* it, so its output at position p predicts
token p + 2. That output replaces the joined states of the next position, which the model has not computed: so a chain
of drafts is drawn. The head has its own vocabulary, as a rule the model's most frequent tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.base import Attend, ModelSpec
from engine.models.decoder import DecoderSpec
from engine.models.rope import RotaryTable
from engine.quant.base import Linear


@dataclass(frozen=True, slots=True, eq=False)
class HeadSpec:
    """A head's config.

    Attributes:
        decoder: of its layer; its vocabulary is the model's.
        target_hidden_size: of the model that it was trained for.
        draft_vocab_size: tokens that it can draft.
        layers: the model's layers whose input states it reads, ascending; None: those of the reference.
        norm_before_residual: the joined states enter the residual normed.
    """

    decoder: DecoderSpec
    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, ...] | None
    norm_before_residual: bool

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers for a model of this depth; raises ValueError where it has too few."""
        layers = self.layers or (2, num_layers // 2, num_layers - 3)
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
            raise ValueError(f"states before layers {list(layers)} are not available from {num_layers} layers")
        return layers


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """A head's weights; norms are float32.

    Attributes:
        embedding: [vocab_size, hidden], of the model's tokens.
        fc: layers * target hidden -> hidden.  qkv: 2 * hidden -> (heads + 2 kv_heads) * head_dim.
        head: hidden -> draft_vocab_size.
        targets: int64 [draft_vocab_size], the model's ids of the head's tokens; None: they are the same.
    """

    embedding: Tensor
    fc: Linear
    input_norm: Tensor
    hidden_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    norm: Tensor
    head: Linear
    targets: Tensor | None


class EagleHead:
    """A head, ready to compute.

    Attributes:
        layers: of the model, whose input states it reads.
        targets: int64 [draft_vocab_size], see `HeadWeights`.
    """

    def __init__(
        self, spec: HeadSpec, layers: tuple[int, ...], weights: HeadWeights, dtype: torch.dtype, max_positions: int
    ) -> None:
        self.layers = layers
        self.targets = weights.targets
        self._decoder = spec.decoder
        self._spec = spec.decoder.model_spec(dtype)
        self._normed_residual = spec.norm_before_residual
        self._weights = weights
        self._rope = RotaryTable(spec.decoder.ropes[0], dtype, weights.norm.device, max_positions)

    @property
    def spec(self) -> ModelSpec:
        """The shape of its layer."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return self._weights.norm.device

    def join(self, states: Tensor) -> Tensor:
        """Join the model's states [T, layers * target hidden] to one vector each, [T, hidden]."""
        with torch.inference_mode():
            return self._weights.fc(states)

    def forward(self, joined: Tensor, next_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the replacement of the next positions' joined states, [T, hidden] in the model's dtype.

        Args:
            joined: [T, hidden], of `join`, or of this function for the position before.
            next_ids: int64 [T], the token behind each position.  positions: int64 [T].
        """
        spec, weights = self._decoder, self._weights
        with torch.inference_mode():
            normed = self._rms_norm(joined, weights.hidden_norm)
            embedded = self._rms_norm(weights.embedding.index_select(0, next_ids), weights.input_norm)
            qkv = weights.qkv(torch.cat((embedded, normed), dim=-1))
            qkv = qkv.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
            qk, v = qkv.tensor_split((spec.num_heads + spec.num_kv_heads,), dim=1)
            q, k = self._rope.lookup(positions, None).apply(qk).tensor_split((spec.num_heads,), dim=1)
            # One row's overflow must not stay in blocks that other rows will own: 0 * NaN = NaN.
            k, v = (x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in (k, v))
            hidden = normed if self._normed_residual else joined
            hidden = hidden + weights.output(attend(0, q, k, v, spec.attention_scale).flatten(1))
            gate, up = weights.gate_up(self._rms_norm(hidden, weights.mlp_norm)).chunk(2, dim=-1)
            gate = F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
            return hidden + weights.down(gate.mul_(up))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [S, draft_vocab_size] for outputs of `forward`, [S, hidden]."""
        with torch.inference_mode():
            return self._weights.head(self._rms_norm(hidden, self._weights.norm)).float()

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self._decoder.norm_eps).to(x.dtype)
