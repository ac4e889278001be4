"""Rotary position embeddings (Su et al. 2021, RoFormer, section 3.4) as tables that are looked up once per step.

Frequencies come from transformers' own initialisers, so that every scaling has its meaning there. With
"dynamic" scaling they depend on a sequence's length, which must not depend on how the sequence was split into chunks:
each token has the length that it is rotated for, and only tokens past the original context are not in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModel

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
    "finetuned", "short_factor", "long_factor",
}  # fmt: skip
_INITIAL_POSITIONS = 2048
_MAX_ALPHA = 1 << 20
_MAX_SCALE = 1000
"""Of cos and sin, far above any model's; products of keys and queries overflow with its square."""


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware scaling by length: the base grows once a sequence is longer than `original_max` tokens."""

    theta: float
    factor: float
    original_max: int


@dataclass(frozen=True, slots=True, eq=False)
class LongFrequencies:
    """Frequencies of an engine whose sequences may be longer than `original_max` tokens (LongRoPE, Ding et al. 2024).

    They are chosen once, by the longest sequence that is allowed, as vLLM and llama.cpp do: chosen by each sequence's
    length, an answer that grows past the limit would attend to keys that were rotated otherwise.
    """

    inverse_frequencies: Tensor
    original_max: int


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + shift) / original_max)) (Nakanishi 2025,
    Scalable-Softmax, as Llama 4 and Ministral 3 approximate it)."""

    beta: float
    original_max: int
    shift: int = 0

    def factors(self, positions: Tensor) -> Tensor:
        """float32 [T] of int64 positions [T]."""
        return 1 + self.beta * torch.log1p(((positions + self.shift) // self.original_max).float())


@dataclass(frozen=True, slots=True, eq=False)
class RopeSpec:
    """How one kind of layer encodes positions.

    Attributes:
        kind: the scaling's name.
        inverse_frequencies: float32 [rotated pairs].
        scale: factor of cos and sin.
        dynamic: set when frequencies depend on the sequence's length.
        passing: pairs behind the rotated ones that stay as they are; head_dim / 2 pairs in all.
        long: set when longer contexts have frequencies of their own.
        growth: of queries with their position.
    """

    kind: str
    inverse_frequencies: Tensor
    scale: float = 1.0
    dynamic: DynamicScaling | None = None
    passing: int = 0
    long: LongFrequencies | None = None
    growth: QueryGrowth | None = None


class Rotation(NamedTuple):
    """cos and sin for the tokens of a step, [T, 1, head_dim]; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [T, heads, head_dim] (halves paired, as transformers lays heads out); returns a new tensor."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


def no_rope(head_dim: int, growth: QueryGrowth | None = None) -> RopeSpec:
    """Layers without positions (NoPE, Kazemnejad et al. 2023)."""
    return RopeSpec("none", torch.empty(0), passing=head_dim // 2, growth=growth)


def rope_spec(
    config: Any, head_dim: int, layer_type: str | None = None, *, partial: bool = False, ignored: Sequence[str] = ()
) -> RopeSpec:
    """Read a transformers config's rotary parameters.

    Args:
        layer_type: the key to read when the config holds parameters per layer type.
        partial: whether this family's heads may be rotated in part (`partial_rotary_factor`).
        ignored: parameters that the family's function reads itself, or that matter to other inputs than text.

    Raises:
        UnsupportedModel: for scalings and parameters that this engine does not compute.
    """
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known are {', '.join(_KINDS)}")
    if unknown := sorted(set(parameters) - _KNOWN_KEYS - set(ignored)):
        raise UnsupportedModel(f"rope parameter {unknown[0]!r} is not supported")
    part = parameters.get("partial_rotary_factor")
    part = 1.0 if part is None else part
    rotated = int(head_dim * part)
    if kind == "proportional":  # the dimensions that stay as they are have frequencies, too: zeros
        if not 0 <= part <= 1:
            raise UnsupportedModel(f"partial_rotary_factor is {part}, but must be from 0 to 1")
        rotated = head_dim
    if part != 1.0 and not partial:
        raise UnsupportedModel(f"partial_rotary_factor {part} is not supported for {config.model_type} models")
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise UnsupportedModel(
            f"partial_rotary_factor is {part}, but must leave an even number of a head's {head_dim} dimensions"
        )
    theta = float(parameters["rope_theta"])
    if kind == "dynamic" and (alpha := parameters.get("alpha")):  # Hunyuan's: the same for all lengths
        if not 0 < alpha <= _MAX_ALPHA or rotated == 2:
            raise UnsupportedModel(f"the rope parameter alpha is {alpha}, but must be above 0, to {_MAX_ALPHA}")
        kind, theta = "default", theta * alpha ** (rotated / (rotated - 2))
    if kind == "default":
        frequencies, scale = _plain_frequencies(theta, rotated), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= _MAX_SCALE:
        raise UnsupportedModel(f"attention_factor gives a scale of {scale!r}, but it must be above 0, to {_MAX_SCALE}")
    if not bool(torch.isfinite(frequencies).all()):
        raise UnsupportedModel(f"the rope parameters {dict(parameters)} give rotary frequencies that are not finite")
    dynamic = DynamicScaling(theta, parameters["factor"], config.max_position_embeddings) if kind == "dynamic" else None
    if len(frequencies) != rotated // 2:
        raise UnsupportedModel(f"the rope parameters give {len(frequencies)} frequencies, not {rotated // 2}")
    long = _long_frequencies(config, parameters, layer_type) if kind == "longrope" else None
    return RopeSpec(kind, frequencies, float(scale), dynamic, (head_dim - rotated) // 2, long)


def _long_frequencies(config: Any, parameters: Any, layer_type: str | None) -> LongFrequencies:
    original_max = int(parameters["original_max_position_embeddings"])
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        config, torch.device("cpu"), seq_len=original_max + 1, layer_type=layer_type
    )
    if not bool(torch.isfinite(frequencies).all()):
        raise UnsupportedModel(f"long_factor {parameters['long_factor']} gives frequencies that are not finite")
    return LongFrequencies(frequencies, original_max)


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
        stall the queue of kernels: there all of them must be given here. Without `positions` a sequence may have any
        length."""
        self._spec = spec
        self._dtype = dtype
        frequencies = spec.inverse_frequencies
        if spec.long is not None and (positions is None or positions > spec.long.original_max):
            frequencies = spec.long.inverse_frequencies
        self._frequencies = frequencies.to(device=device, dtype=torch.float32)
        self._grows = device.type == "cpu"
        self._table = self._rows(0, positions or _INITIAL_POSITIONS)

    def lookup(self, positions: Tensor, lengths: Tensor | None) -> Rotation:
        """The rotation of tokens at int64 `positions` [T]; int64 `lengths` [T] are read with dynamic scaling only."""
        cos, sin = self.rows(positions, lengths).chunk(2, dim=-1)
        return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def rows(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """[T, head_dim], a new tensor: cosines, then sines, of half a head."""
        table = self.table(int(positions.max()) + 1) if self._grows else self._table
        rows = table.index_select(0, positions)
        dynamic = self._spec.dynamic
        if dynamic is not None:
            if lengths is None:
                raise ValueError("dynamic rope needs the rope length of each token")
            longer = (lengths > dynamic.original_max).nonzero().squeeze(1)
            if longer.numel():
                frequencies = self._stretched(dynamic, lengths[longer])
                rows[longer] = self._encode(positions[longer, None] * frequencies)
        return rows

    def table(self, positions: int) -> Tensor:
        """Rows of so many positions, or more, of sequences of any length that has the table's frequencies."""
        have = self._table.shape[0]
        if positions > have:
            self._table = torch.cat((self._table, self._rows(have, max(positions, 2 * have))))
        return self._table

    def _rows(self, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, dtype=torch.float32, device=self._frequencies.device)
        return self._encode(positions[:, None] * self._frequencies)

    def _encode(self, angles: Tensor) -> Tensor:
        cos, sin = angles.cos() * self._spec.scale, angles.sin() * self._spec.scale
        passing = (0, self._spec.passing)
        return torch.cat((F.pad(cos, passing, value=1.0), F.pad(sin, passing)), dim=-1).to(self._dtype)

    def _stretched(self, dynamic: DynamicScaling, lengths: Tensor) -> Tensor:
        """Inverse frequencies float32 [tokens, rotated pairs] for sequences of these lengths."""
        dim = 2 * self._frequencies.shape[0]
        growth = dynamic.factor * lengths / dynamic.original_max - (dynamic.factor - 1)
        theta = dynamic.theta * growth ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=lengths.device) / dim
        return 1.0 / theta[:, None] ** exponents


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
