"""Builds a fused decoder from a weight source: every tensor is read once, into the place it is computed from.

Products are packed layer by layer, so loading never holds more than the model, one layer and one tensor. What a
checkpoint lacks, holds in another shape, or holds beyond what the model reads, is an error that names the tensor:
leftovers mean that the config does not say what the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.models.checkpoint import DERIVED, WeightSource
from engine.models.decoder import DecoderSpec, FusedDecoder, Layer
from engine.quant.base import DenseLinear, Linear, dense, packs

_HEADS = ("lm_head.weight", "language_model.lm_head.weight")

_PACKED_HEAD_BYTES = 128 << 20
"""A tied head is packed as a second copy only up to this size: small models gain 10 to 60 % on their largest product,
large ones would pay gigabytes for little."""


class _Reader:
    """Takes tensors from a source, each once, and knows at the end what was left."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._left = set(source.names)
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return name in self._left

    def expect(self, name: str, *wanted: int) -> None:
        """Before memory is taken for it: the tensor is there and has the shape that the config asks for."""
        if name not in self._left:
            raise CorruptWeights(f"tensor {name} is missing from the checkpoint")
        if (shape := self._source.shape(name)) != wanted:
            raise CorruptWeights(f"tensor {name} has shape {list(shape)}, but the config asks for {list(wanted)}")

    def fill(self, name: str, into: Tensor) -> None:
        self.expect(name, *into.shape)
        self._source.read(name, into)
        self._left.remove(name)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        self.expect(name, rows, columns)
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        self.fill(name, weight)
        return weight

    def fused(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """One `Linear` from the products `names`, stacked."""
        for name, count in zip(names, rows, strict=True):
            self.expect(f"{name}.weight", count, columns)
        weight = torch.empty(sum(rows), columns, dtype=self.dtype, device=self.device)
        offset = torch.empty(sum(rows), dtype=self.dtype, device=self.device) if bias else None
        for index, part in enumerate(torch.split(weight, list(rows))):
            self.fill(f"{names[index]}.weight", part)
        if offset is not None:
            for index, part in enumerate(torch.split(offset, list(rows))):
                self.fill(f"{names[index]}.bias", part)
        return dense(weight, offset)

    def norm(self, name: str, size: int, offset: bool) -> Tensor:
        weight = torch.empty(size, dtype=torch.float32, device=self.device)
        self.fill(f"{name}.weight", weight)
        return weight.add_(1) if offset else weight

    def finish(self, ignored: tuple[str, ...]) -> None:
        rest = sorted(n for n in self._left if not n.endswith(DERIVED) and not n.startswith(ignored or ("\0",)))
        if rest:
            more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
            raise CorruptWeights(f"the checkpoint holds tensor {rest[0]}{more}, which this architecture has no use for")


def build_decoder(
    spec: DecoderSpec, source: WeightSource, *, dtype: torch.dtype, device: torch.device, positions: int | None = None
) -> FusedDecoder:
    """Read the weights of `spec` and put them where they will be used.

    Raises:
        CorruptWeights: a tensor is missing, has another shape, can't be read, or is one too many.
    """
    reader = _Reader(source, dtype, device)
    prefix = next((p for p in spec.weight_prefixes if reader.has(f"{p}embed_tokens.weight")), spec.weight_prefixes[0])
    embedding = reader.matrix(f"{prefix}embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(_layer(spec, reader, f"{prefix}layers.{index}") for index in range(spec.num_layers))
    norm = reader.norm(f"{prefix}norm", spec.hidden_size, spec.norm_offset)
    head = _head(spec, reader, embedding)
    reader.finish(spec.ignored_weights)
    return FusedDecoder(spec, dtype, embedding=embedding, layers=layers, norm=norm, head=head, positions=positions)


def _layer(spec: DecoderSpec, reader: _Reader, name: str) -> Layer:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"

    def norm(part: str) -> Tensor:
        return reader.norm(f"{name}.{part}", hidden, spec.norm_offset)

    qk_norm = None
    if spec.qk_norm:
        q = reader.norm(f"{attention}.q_norm", spec.head_dim, spec.norm_offset)
        k = reader.norm(f"{attention}.k_norm", spec.head_dim, spec.norm_offset)
        qk_norm = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
    qkv_names = [f"{attention}.{part}_proj" for part in "qkv"]
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=reader.fused(qkv_names, spec.qkv_sizes, hidden, spec.qkv_bias),
        output=reader.fused([f"{attention}.o_proj"], [hidden], spec.qkv_sizes[0], spec.output_bias),
        mlp_norm=norm("pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"),
        gate_up=reader.fused([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, spec.mlp_bias),
        down=reader.fused([f"{mlp}.down_proj"], [hidden], inner, spec.mlp_bias),
        qk_norm=qk_norm,
        output_norm=norm("post_attention_layernorm") if spec.sandwich_norms else None,
        down_norm=norm("post_feedforward_layernorm") if spec.sandwich_norms else None,
    )


def _head(spec: DecoderSpec, reader: _Reader, embedding: Tensor) -> Linear:
    """The language-model head. A checkpoint that stores a head unlike the embedding it is tied to means the head."""
    name = next((head for head in _HEADS if reader.has(head)), _HEADS[0])
    if not spec.tied or reader.has(name):
        head = reader.matrix(name, spec.vocab_size, spec.hidden_size)
        if not (spec.tied and torch.equal(head, embedding)):
            return dense(head)
    small = embedding.numel() * embedding.element_size() <= _PACKED_HEAD_BYTES
    return dense(embedding) if small and packs(embedding.dtype, embedding.device) else DenseLinear(embedding)
