"""Rotary position embeddings (Su et al. 2021, RoFormer, section 3.4) as tables that are looked up once per step.

Frequencies come from transformers' own initialisers, so that every scaling has its meaning there. With
"dynamic" scaling they depend on a sequence's length, which must not depend on how the sequence was split into chunks:
each token has the length that it is rotated for, and only tokens past the original context are not in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModel

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
    "finetuned",
}  # fmt: skip
_INITIAL_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling by length: the base grows once a sequence is longer than `original_max` tokens."""

    theta: float
    factor: float
    original_max: int


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """How one kind of layer is rotated.

    Attributes:
        kind: the scaling's name.
        inverse_frequencies: float32 [head_dim / 2]; zeros for dimensions that are not rotated.
        scale: factor of cos and sin.
        dynamic: set when frequencies depend on the sequence's length.
        rotary_dim: leading dimensions of a head that are rotated, None: all. The loader reorders those of q and k, so
            that the halves that rotate together lie half a head apart, as they do where all are rotated.
    """

    kind: str
    inverse_frequencies: Tensor
    scale: float = 1.0
    dynamic: DynamicScaling | None = None
    rotary_dim: int | None = None

    def head_order(self, head_dim: int) -> Tensor | None:
        """int64 [head_dim]: the dimension of a stored head at each place of a loaded one; None: they lie in order."""
        if self.rotary_dim is None:
            return None
        half, first = head_dim // 2, self.rotary_dim // 2
        rest = torch.arange(self.rotary_dim, head_dim).tensor_split((half - first,))
        return torch.cat((torch.arange(first), rest[0], torch.arange(first, 2 * first), rest[1]))


class Rotation(NamedTuple):
    """cos and sin for the tokens of a step, [T, 1, head_dim]; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [T, heads, head_dim] (halves paired, as transformers lays heads out); returns a new tensor."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


def rope_spec(config: Any, head_dim: int, layer_type: str | None = None, *, partial: bool = False) -> RopeSpec:
    """Read a transformers config's rotary parameters.

    Args:
        layer_type: the key to read when the config holds parameters per layer type.
        partial: of a family whose `partial_rotary_factor` says how much of each head is rotated.

    Raises:
        UnsupportedModel: for scalings and parameters that this engine does not compute.
    """
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known are {', '.join(_KINDS)}")
    if unknown := sorted(set(parameters) - _KNOWN_KEYS):
        raise UnsupportedModel(f"rope parameter {unknown[0]!r} is not supported")
    share = parameters.get("partial_rotary_factor")
    share = 1.0 if share is None else float(share)
    rotated = int(head_dim * share) if 0 < share <= 1 else 0
    if share != 1 and not (partial and rotated >= 2 and rotated % 2 == 0):
        raise UnsupportedModel(f"partial_rotary_factor {share} is not supported here")
    theta = float(parameters["rope_theta"])
    if kind == "default":
        frequencies, scale = _plain_frequencies(theta, rotated), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    if not bool(torch.isfinite(frequencies).all()):
        raise UnsupportedModel(f"the rope parameters {dict(parameters)} give rotary frequencies that are not finite")
    if rotated < head_dim:
        if scale != 1 or kind == "dynamic":
            raise UnsupportedModel(f"rope_type {kind!r} with partial_rotary_factor {share} is not supported")
        frequencies = F.pad(frequencies, (0, (head_dim - rotated) // 2))
        return RopeSpec(kind, frequencies, rotary_dim=rotated)
    dynamic = DynamicScaling(theta, parameters["factor"], config.max_position_embeddings) if kind == "dynamic" else None
    return RopeSpec(kind, frequencies, scale, dynamic)


def context_length(config: Any, rope: RopeSpec) -> int:
    """Return the context length of the weights' training: scalings extend the config's maximum."""
    longest = int(config.max_position_embeddings)
    if rope.dynamic is not None:
        return int(longest * rope.dynamic.factor)
    if rope.kind == "yarn":
        parameters = config.rope_parameters.get("full_attention") or config.rope_parameters
        return max(longest, int(parameters["original_max_position_embeddings"] * (parameters.get("factor") or 1)))
    return longest


class RotaryTable:
    """cos and sin of every position, computed in float32 and stored in the model's dtype as [positions, head_dim].

    A row is the cosines and then the sines of half a head; the other half repeats them.
    """

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device, positions: int | None = None) -> None:
        """Positions beyond `positions` are added on first use, except on devices where reading the positions would
        stall
        the queue of kernels: there all of them must be given here."""
        self._spec = spec
        self._dtype = dtype
        self._frequencies = spec.inverse_frequencies.to(device=device, dtype=torch.float32)
        self._grows = device.type == "cpu"
        self._table = self._rows(0, positions or _INITIAL_POSITIONS)

    def lookup(self, positions: Tensor, lengths: Tensor | None) -> Rotation:
        """The rotation of tokens at int64 `positions` [T]; int64 `lengths` [T] are read with dynamic scaling only."""
        cos, sin = self.rows(positions, lengths).chunk(2, dim=-1)
        return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def rows(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """[T, head_dim], a new tensor: cosines, then sines, of half a head."""
        if self._grows:
            self._grow(int(positions.max()) + 1)
        rows = self._table.index_select(0, positions)
        dynamic = self._spec.dynamic
        if dynamic is not None:
            if lengths is None:
                raise ValueError("dynamic rope needs the rope length of each token")
            longer = (lengths > dynamic.original_max).nonzero().squeeze(1)
            if longer.numel():
                frequencies = self._stretched(dynamic, lengths[longer])
                rows[longer] = self._encode(positions[longer, None] * frequencies)
        return rows

    def _grow(self, positions: int) -> None:
        have = self._table.shape[0]
        if positions > have:
            self._table = torch.cat((self._table, self._rows(have, max(positions, 2 * have))))

    def _rows(self, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, dtype=torch.float32, device=self._frequencies.device)
        return self._encode(positions[:, None] * self._frequencies)

    def _encode(self, angles: Tensor) -> Tensor:
        return (torch.cat((angles.cos(), angles.sin()), dim=-1) * self._spec.scale).to(self._dtype)

    def _stretched(self, dynamic: DynamicScaling, lengths: Tensor) -> Tensor:
        """Inverse frequencies float32 [tokens, head_dim / 2] for sequences of these lengths."""
        dim = 2 * self._frequencies.shape[0]
        growth = dynamic.factor * lengths / dynamic.original_max - (dynamic.factor - 1)
        theta = dynamic.theta * growth ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=lengths.device) / dim
        return 1.0 / theta[:, None] ** exponents


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
