"""Gated linear recurrences: layers that remember a sequence in a matrix a head, behind a short convolution.

A head's matrix S [key_dim, value_dim] maps keys to values. A token with key k, value v and query q changes it to
S' = a S + k c^T, with a decay a from 0 to 1, and its output is S'^T q. Mamba-2 adds the value, c = r v, with a step
size r (Dao & Gu 2024, arXiv 2405.21060, section 3). The gated delta rule adds what is missing for the key,
c = r (v - a S^T k), with a rate r from 0 to 1 (Yang et al. 2024, arXiv 2412.06464, equation 10).

q, k and v come out of a causal convolution over the last few tokens, whose inputs are remembered, too. Single tokens
are computed by the recurrence, all rows at once. Longer runs are computed in chunks (section 3.3 of the latter, the WY
form): within a chunk the corrections solve a triangular system, so that a chunk is a few matrix products and the matrix
is read and written once. Both compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.models.state_layers.gates import Gates
from engine.states import NO_SLOT, Segments, StateShape

CHUNK = 64
"""Tokens of a chunk: within it, work grows with its square."""

_WIDTHS = (4, 16)
"""Segments of at most so many tokens, as drafts are, aren't padded to the length of longer ones."""

_ROWS_AT_ONCE = 32
"""Single tokens whose states are held at once, beside the stored ones: a state is megabytes."""

_EPSILON = 1e-6
"""Of the norms of q and k, as in the kernels of the papers' authors."""


@dataclass(frozen=True, slots=True)
class RecurrenceShape:
    """The sizes of a layer.

    Attributes:
        num_key_heads, num_value_heads: neighbouring value heads share a key head.
        key_dim, value_dim: of one head.
        kernel_size: tokens that the convolution sees, 2 at least.
        values_first: the convolved features are v, k and q; else q, k and v.
        delta_rule: matrices are corrected by the delta rule, and q and k are normed to 1, q divided by sqrt(key_dim).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    values_first: bool = False
    delta_rule: bool = True

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of q, k and v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def starts(self) -> tuple[int, int, int]:
        """The first feature of q, of k and of v among the convolved ones."""
        keys, _, values = self.sizes
        return (values + keys, values, 0) if self.values_first else (0, keys, 2 * keys)

    def state(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """A layer's state: the convolution's last inputs in the model's dtype, and the heads' matrices."""
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return StateShape((self.kernel_size - 1, sum(self.sizes)), dtype), StateShape(matrices, torch.float32)


class Recurrence:
    """The `StateOperator` of a layer, of torch's operators.

    Its inputs are the convolution's [T, features] in the model's dtype, and what `Gates` takes.

    Attributes:
        gates: makes rates and decays.
        conv: float32 [kernel_size, features].  bias: float32 [features], of the convolution.
        skip: float32 [value_heads], factors of the values that join the outputs.
    """

    __slots__ = ("bias", "conv", "gates", "shape", "skip")

    def __init__(
        self, shape: RecurrenceShape, gates: Gates, conv: Tensor, bias: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`conv`: float32 [features, kernel_size], as checkpoints store it."""
        self.shape = shape
        self.gates = gates
        self.conv = conv.t().contiguous()
        self.bias = bias
        self.skip = skip

    def __call__(self, states: tuple[Tensor, ...], segments: Segments, *inputs: Tensor) -> Tensor:
        """See `StateOperator`; returns float32 [T, value_heads, value_dim]."""
        remembered, matrices = states
        features, gates = inputs[0], self.gates(inputs[1])
        shape = (len(features), self.shape.num_value_heads, self.shape.value_dim)
        out = torch.empty(shape, dtype=torch.float32, device=features.device)
        for first in range(0, segments.num_single, _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, segments.num_single))
            self._single(remembered, matrices, segments, rows, features, gates, out)
        for rows in _alike(segments):
            self._runs(remembered, matrices, segments, rows, features, gates, out)
        return out

    def _single(
        self, remembered: Tensor, matrices: Tensor, segments: Segments, rows: slice, features: Tensor, gates: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Compute the segments `rows`, of one token each, all at once."""
        shape, device = self.shape, features.device
        at, read, write = (_ids(ids[rows], device) for ids in (segments.first, segments.read, segments.write))
        seen = torch.cat((remembered.index_select(0, read), features.index_select(0, at)[:, None]), dim=1)
        tokens = _Tokens(self, (seen.float() * self.conv).sum(1), gates.index_select(0, at))
        stored = matrices.index_select(0, read)
        shared = shape.num_value_heads // shape.num_key_heads
        decay = tokens.decay.exp().unsqueeze(-1)
        # S^T k and S^T q after the decay, [rows, value_heads, value_dim]
        both = torch.stack((tokens.k, tokens.q), dim=2)[:, :, None] @ _grouped(stored, 1, shape)
        held, kept = (part.flatten(1, 2) * decay for part in both.unbind(3))
        correction = (tokens.v - held if shape.delta_rule else tokens.v) * tokens.rate.unsqueeze(-1)
        match = (tokens.q * tokens.k).sum(-1).repeat_interleave(shared, dim=1).unsqueeze(-1)
        out.index_copy_(0, at, self._skipped(kept.addcmul_(match, correction), tokens.v))
        keys = tokens.k.repeat_interleave(shared, dim=1)
        stored.mul_(decay.unsqueeze(-1)).flatten(0, 1).baddbmm_(
            keys.flatten(0, 1)[:, :, None], correction.flatten(0, 1)[:, None]
        )
        stores = np.flatnonzero(segments.write[rows] != NO_SLOT)
        if len(stores) < len(at):
            chosen = _ids(stores, device)
            seen, stored, write = seen[chosen], stored[chosen], write[chosen]
        remembered.index_copy_(0, write, seen[:, 1:])
        matrices.index_copy_(0, write, stored)

    def _runs(
        self, remembered: Tensor, matrices: Tensor, segments: Segments, rows: slice, features: Tensor, gates: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Compute the segments `rows`, one after the other; what needs no state for all of them at once."""
        device, before = features.device, self.shape.kernel_size - 1
        first, count, read, write = (
            part[rows].tolist() for part in (segments.first, segments.count, segments.read, segments.write)
        )
        seen = []
        for segment, start in enumerate(first):
            seen.append(torch.cat((remembered[read[segment]], features[start : start + count[segment]])))
            if write[segment] != NO_SLOT:
                remembered[write[segment]] = seen[-1][-before:]
        whole = torch.cat(seen).float()
        total = len(whole) - before
        mixed = whole[:total] * self.conv[0]
        for tap in range(1, before + 1):
            mixed.addcmul_(whole[tap : total + tap], self.conv[tap])
        chunks = _Chunks.of(np.array(first), np.array(count), before)
        tokens = _Tokens(self, mixed[_ids(chunks.mixed, device)], gates[_ids(chunks.tokens, device)])
        valid = torch.from_numpy(chunks.valid).to(device)[..., None]
        tokens.rate.mul_(valid)
        tokens.decay.mul_(valid)
        solved = _solved(tokens, self.shape)
        results, chunk = [], 0
        for segment, end in enumerate(chunks.ends.tolist()):
            state = _grouped(matrices[read[segment]], 0, self.shape)
            while chunk < end:
                state, result = solved.step(chunk, state)
                results.append(result)
                chunk += 1
            if write[segment] != NO_SLOT:
                matrices[write[segment]] = state.flatten(0, 1)
        # [chunks, key_heads, values of each, width, value_dim] -> by tokens
        made = self._skipped(torch.stack(results).movedim(3, 1).flatten(2, 3), tokens.v).flatten(0, 1)
        places = _ids(np.flatnonzero(chunks.valid), device)
        out.index_copy_(0, _ids(chunks.tokens[chunks.valid], device), made.index_select(0, places))

    def _skipped(self, out: Tensor, v: Tensor) -> Tensor:
        return out if self.skip is None else out + v * self.skip[:, None]


class _Tokens:
    """q, k, v, rates and decays of some tokens, float32: [..., key_heads, dim], [..., value_heads, dim] and
    [..., value_heads]; decays as logarithms."""

    __slots__ = ("decay", "k", "q", "rate", "v")

    def __init__(self, of: Recurrence, convolved: Tensor, gates: Tensor) -> None:
        shape, lead = of.shape, convolved.shape[:-1]
        mixed = F.silu(convolved if of.bias is None else convolved + of.bias)
        q, k, v = (mixed[..., first : first + size] for first, size in zip(shape.starts, shape.sizes, strict=True))
        self.q = q.view(*lead, shape.num_key_heads, shape.key_dim)
        self.k = k.view(*lead, shape.num_key_heads, shape.key_dim)
        self.v = v.view(*lead, shape.num_value_heads, shape.value_dim)
        if shape.delta_rule:
            self.q, self.k = _unit(self.q).mul_(shape.key_dim**-0.5), _unit(self.k)
        self.rate, self.decay = gates.chunk(2, dim=-1)


def _alike(segments: Segments) -> list[slice]:
    """Cut the segments behind the single ones, in their order, into groups of like lengths: all of a group are padded
    to the longest."""
    kinds = np.digitize(segments.count[segments.num_single :], _WIDTHS, right=True)
    borders = segments.num_single + np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
    return [slice(first, end) for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(_EPSILON))


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Segments cut into chunks of equal width, the last one of each padded by repeating its last token.

    Attributes:
        tokens: int64 [chunks, width], the tokens' indices in the step.  mixed: in the convolution's output.
        valid: bool [chunks, width], not padding.
        ends: int64 [segments]: a segment's chunks end before this one.
    """

    tokens: NDArray[np.int64]
    mixed: NDArray[np.int64]
    valid: NDArray[np.bool_]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, first: NDArray[np.int64], count: NDArray[np.int64], before: int) -> _Chunks:
        """`before`: inputs that the convolution sees in front of each segment's first token."""
        width = min(CHUNK, int(count.max()))
        chunks = -(-count // width)
        ends = np.cumsum(chunks)
        owner = np.repeat(np.arange(len(count)), chunks)
        start = (np.arange(ends[-1]) - (ends - chunks)[owner]) * width
        wanted = start[:, None] + np.arange(width)
        inside = np.minimum(wanted, count[owner, None] - 1)
        offset = np.cumsum(count + before) - count - before
        return cls(first[owner, None] + inside, offset[owner, None] + inside, wanted == inside, ends)


@dataclass(frozen=True, slots=True)
class _Solved:
    """What chunks need besides the state that they begin with: [chunks, key_heads, values of each, width, ...].

    Attributes:
        corrected: the corrections of an empty state.  erased: what they lose for each key of the state; None: nothing.
        queries: decayed since the chunk's beginning.  keys: decaying until its end.
        scores: of queries with keys, lower triangular.  decay: of the whole chunk.
    """

    corrected: Tensor
    erased: Tensor | None
    queries: Tensor
    keys: Tensor
    scores: Tensor
    decay: Tensor

    def step(self, chunk: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state [key_heads, values of each, key_dim, value_dim] behind the chunk, and the chunk's outputs."""
        correction = self.corrected[chunk]
        if self.erased is not None:
            correction = correction - self.erased[chunk] @ state
        out = self.queries[chunk] @ state + self.scores[chunk] @ correction
        return self.decay[chunk] * state + self.keys[chunk].mT @ correction, out


def _solved(tokens: _Tokens, shape: RecurrenceShape) -> _Solved:
    """Solve all chunks; tokens of [chunks, width] each."""
    q, k = (part.transpose(1, 2) for part in (tokens.q, tokens.k))  # [chunks, key_heads, width, key_dim]
    v, rate, decay = (_grouped(part, 2, shape).movedim(1, 3) for part in (tokens.v, tokens.rate, tokens.decay))
    since = decay.cumsum(-1)
    width = since.shape[-1]
    later = torch.ones(width, width, dtype=torch.bool, device=q.device).triu_(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    corrected, erased = v * rate[..., None], None
    if shape.delta_rule:
        system = (k @ k.mT)[:, :, None] * between * rate[..., None]
        lost = k[:, :, None] * (since.exp() * rate)[..., None]
        solved = torch.linalg.solve_triangular(
            system, torch.cat((corrected, lost), dim=-1), upper=False, unitriangular=True
        )
        corrected, erased = solved.tensor_split((shape.value_dim,), dim=-1)
    return _Solved(
        corrected=corrected,
        erased=erased,
        queries=q[:, :, None] * since.exp()[..., None],
        keys=k[:, :, None] * (since[..., -1:] - since).exp()[..., None],
        scores=(q @ k.mT)[:, :, None] * between,
        decay=since[..., -1].exp()[..., None, None],
    )


def _grouped(x: Tensor, dim: int, shape: RecurrenceShape) -> Tensor:
    """x with its dimension of value heads split into key heads and the values of each."""
    return x.view(*x.shape[:dim], shape.num_key_heads, -1, *x.shape[dim + 1 :])


def _ids(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
