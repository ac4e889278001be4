"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464): layers that remember a sequence in a matrix a head.

A head's state S [key_dim, value_dim] maps keys to values. Each token lets it decay, and corrects what it holds for the
token's key k by the delta rule (equation 10, transposed): S' = a S + k (b (v - a S^T k))^T, with the decay a and the
rate b from 0 to 1; the output for a query q is S'^T q. q, k and v go through a short causal convolution first, whose
state is its last few inputs.

Single tokens are computed so, all rows at once. Longer runs are computed in chunks (section 3.3, the WY form): within a
chunk the corrections solve a triangular system, so that a chunk is a few matrix products and the state is read and
written once. Both compute in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import CorruptWeights
from engine.models.base import Attend
from engine.quant.base import Linear
from engine.states import NO_SLOT, Segments, StateShape

CHUNK = 64
"""Tokens of a chunk: within it, work grows with its square."""

_ROWS_AT_ONCE = 32
"""Single tokens whose states are held at once, beside the stored ones: a state is megabytes."""

_EPSILON = 1e-6
"""Of the norms of q and k, as in the authors' kernels."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The sizes of a decoder's gated delta nets.

    Attributes:
        layers: per layer, whether it is one; the others attend.
        num_key_heads, num_value_heads: neighbouring value heads share a key head.
        key_dim, value_dim: of one head.
        kernel_size: tokens that a convolution sees.
        interleaved: checkpoints store the products as `in_proj_qkvz` and `in_proj_ba`, whose rows are sorted by key
            heads; else as `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    interleaved: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of q, k and v, which are convolved."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    def state(self, dtype: torch.dtype) -> tuple[StateShape, ...]:
        """A layer's state: the convolution's last inputs in the model's dtype, and the heads' matrices."""
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return StateShape((self.kernel_size - 1, sum(self.sizes)), dtype), StateShape(matrices, torch.float32)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of a layer's part, the output product included."""
        q, k, v = self.sizes
        products = hidden_size * (q + k + 3 * v + 2 * self.num_value_heads)
        return products + (q + k + v) * self.kernel_size + 2 * self.num_value_heads + self.value_dim

    def qkvz_order(self) -> Tensor:
        """Where the rows of q, k, v and z, stacked, lie in `in_proj_qkvz`: int64 [rows]."""
        values = self.num_value_heads // self.num_key_heads * self.value_dim
        return _by_parts(self.num_key_heads, (self.key_dim, self.key_dim, values, values))

    def ba_order(self) -> Tensor:
        """Likewise the rows of b and a in `in_proj_ba`."""
        return _by_parts(self.num_key_heads, (self.num_value_heads // self.num_key_heads,) * 2)


def _by_parts(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Rows that are sorted by heads, each of which has parts of these sizes, sorted by parts."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), dim=1)])


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """A layer's weights, but for the output product.

    Attributes:
        qkvz: hidden -> q, k, v, and the gate z of the output.
        ba: float32 [2 * value_heads, hidden]: rates before their sigmoid, and decays before their softplus. A decay's
            error multiplies over all tokens, so this product is not rounded.
        rule: computes the heads' outputs.
        norm: float32 [value_dim], of each head's output.
    """

    qkvz: Linear
    ba: Tensor
    rule: DeltaRule
    norm: Tensor

    def attended(self, layer: int, x: Tensor, attend: Attend, epsilon: float) -> Tensor:
        """[T, hidden], normed -> the heads' outputs [T, value_heads, value_dim], normed and gated."""
        spec = self.rule.spec
        qkv, z = self.qkvz(x).tensor_split((sum(spec.sizes),), dim=1)
        out = attend.scan(layer, self.rule, qkv, F.linear(x.float(), self.ba))
        normed = F.rms_norm(out, (spec.value_dim,), weight=self.norm, eps=epsilon)
        return normed.mul_(F.silu(z.float()).view_as(normed)).to(x.dtype)


class _Tokens:
    """q, k, v, rates and decays of some tokens, float32: [..., key_heads, dim], [..., value_heads, dim] and
    [..., value_heads], normed and scaled; decays as logarithms."""

    __slots__ = ("decay", "k", "q", "rate", "v")

    def __init__(self, rule: DeltaRule, qkv: Tensor, ba: Tensor) -> None:
        spec = rule.spec
        q, k, v = torch.split(F.silu(qkv), list(spec.sizes), dim=-1)
        lead = qkv.shape[:-1]
        self.q = _unit(q.view(*lead, spec.num_key_heads, spec.key_dim)).mul_(spec.key_dim**-0.5)
        self.k = _unit(k.view(*lead, spec.num_key_heads, spec.key_dim))
        self.v = v.view(*lead, spec.num_value_heads, spec.value_dim)
        b, a = ba.float().chunk(2, dim=-1)
        self.rate = b.sigmoid()
        self.decay = F.softplus(a + rule.decay_bias) * rule.decay_scale


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(_EPSILON))


class DeltaRule:
    """The `StateOperator` of a layer: from what the layer's products give to the outputs of its heads.

    Its inputs are q, k and v before the convolution [T, channels], and b and a [T, 2 * value_heads].
    """

    __slots__ = ("conv", "decay_bias", "decay_scale", "spec")

    def __init__(self, spec: DeltaSpec, conv: Tensor, decay_log: Tensor, decay_bias: Tensor) -> None:
        """From float32 tensors: conv [channels, kernel_size], the checkpoint's `A_log` and `dt_bias` [value_heads]."""
        self.spec = spec
        self.conv = conv.t().contiguous()
        self.decay_scale = -decay_log.exp()
        if not bool(self.decay_scale.isfinite().all()):
            raise CorruptWeights("the tensor A_log of a gated delta net holds values whose exponential is not finite")
        self.decay_bias = decay_bias

    def __call__(self, states: tuple[Tensor, ...], segments: Segments, *inputs: Tensor) -> Tensor:
        """See `StateOperator`; returns float32 [T, value_heads, value_dim]."""
        convolved, matrices = states
        qkv, ba = inputs
        out = torch.empty(
            len(qkv), self.spec.num_value_heads, self.spec.value_dim, dtype=torch.float32, device=qkv.device
        )
        for first in range(0, segments.num_single, _ROWS_AT_ONCE):
            rows = slice(first, min(first + _ROWS_AT_ONCE, segments.num_single))
            self._single(convolved, matrices, segments, rows, qkv, ba, out)
        if segments.num_single < len(segments.first):
            self._runs(convolved, matrices, segments, qkv, ba, out)
        return out

    def _single(
        self, convolved: Tensor, matrices: Tensor, segments: Segments, rows: slice, qkv: Tensor, ba: Tensor, out: Tensor
    ) -> None:
        """Compute the segments `rows`, of one token each, all at once."""
        spec, device = self.spec, qkv.device
        at, read, write = (_ids(ids[rows], device) for ids in (segments.first, segments.read, segments.write))
        seen = torch.cat((convolved.index_select(0, read), qkv.index_select(0, at)[:, None]), dim=1)
        tokens = _Tokens(self, (seen.float() * self.conv).sum(1), ba.index_select(0, at))
        stored = matrices.index_select(0, read)
        shared = spec.num_value_heads // spec.num_key_heads
        decay = tokens.decay.exp().unsqueeze(-1)
        # S^T k and S^T q after the decay, [rows, value_heads, value_dim]
        both = torch.stack((tokens.k, tokens.q), dim=2)[:, :, None] @ _grouped(stored, 1, spec)
        held, kept = (part.flatten(1, 2) * decay for part in both.unbind(3))
        correction = (tokens.v - held).mul_(tokens.rate.unsqueeze(-1))
        match = (tokens.q * tokens.k).sum(-1).repeat_interleave(shared, dim=1).unsqueeze(-1)
        out.index_copy_(0, at, kept.addcmul_(match, correction))
        keys = tokens.k.repeat_interleave(shared, dim=1)
        stored.mul_(decay.unsqueeze(-1)).flatten(0, 1).baddbmm_(
            keys.flatten(0, 1)[:, :, None], correction.flatten(0, 1)[:, None]
        )
        stores = np.flatnonzero(segments.write[rows] != NO_SLOT)
        if len(stores) < len(at):
            chosen = _ids(stores, device)
            seen, stored, write = seen[chosen], stored[chosen], write[chosen]
        convolved.index_copy_(0, write, seen[:, 1:])
        matrices.index_copy_(0, write, stored)

    def _runs(
        self, convolved: Tensor, matrices: Tensor, segments: Segments, qkv: Tensor, ba: Tensor, out: Tensor
    ) -> None:
        """Compute the longer segments, one after the other; what needs no state for all of them at once."""
        device, before = qkv.device, self.spec.kernel_size - 1
        first, count, read, write = (
            part[segments.num_single :].tolist()
            for part in (segments.first, segments.count, segments.read, segments.write)
        )
        seen = []
        for segment, start in enumerate(first):
            seen.append(torch.cat((convolved[read[segment]], qkv[start : start + count[segment]])))
            if write[segment] != NO_SLOT:
                convolved[write[segment]] = seen[-1][-before:]
        whole = torch.cat(seen).float()
        total = len(whole) - before
        mixed = whole[:total] * self.conv[0]
        for tap in range(1, before + 1):
            mixed.addcmul_(whole[tap : total + tap], self.conv[tap])
        chunks = _Chunks.of(np.array(first), np.array(count), before)
        tokens = _Tokens(self, mixed[_ids(chunks.mixed, device)], ba[_ids(chunks.tokens, device)])
        valid = torch.from_numpy(chunks.valid).to(device)[..., None]
        tokens.rate.mul_(valid)
        tokens.decay.mul_(valid)
        rows = _solved(tokens, self.spec)
        results, chunk = [], 0
        for segment, end in enumerate(chunks.ends.tolist()):
            state = _grouped(matrices[read[segment]], 0, self.spec)
            while chunk < end:
                state, result = rows.step(chunk, state)
                results.append(result)
                chunk += 1
            if write[segment] != NO_SLOT:
                matrices[write[segment]] = state.flatten(0, 1)
        # [chunks, key_heads, values of each, width, value_dim] -> by tokens
        flat = torch.stack(results).movedim(3, 1).flatten(2, 3).flatten(0, 1)
        places = _ids(np.flatnonzero(chunks.valid), device)
        out.index_copy_(0, _ids(chunks.tokens[chunks.valid], device), flat.index_select(0, places))


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
        corrected, erased: the corrections of an empty state, and what they lose for each key of the state.
        queries: decayed since the chunk's beginning.  keys: decaying until its end.
        scores: of queries with keys, lower triangular.  decay: of the whole chunk.
    """

    corrected: Tensor
    erased: Tensor
    queries: Tensor
    keys: Tensor
    scores: Tensor
    decay: Tensor

    def step(self, chunk: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state [key_heads, values of each, key_dim, value_dim] behind the chunk, and the chunk's outputs."""
        correction = self.corrected[chunk] - self.erased[chunk] @ state
        out = self.queries[chunk] @ state + self.scores[chunk] @ correction
        return self.decay[chunk] * state + self.keys[chunk].mT @ correction, out


def _solved(tokens: _Tokens, spec: DeltaSpec) -> _Solved:
    """Solve all chunks; tokens of [chunks, width] each."""
    q, k = (part.transpose(1, 2) for part in (tokens.q, tokens.k))  # [chunks, key_heads, width, key_dim]
    v, rate, decay = (_grouped(part, 2, spec).movedim(1, 3) for part in (tokens.v, tokens.rate, tokens.decay))
    since = decay.cumsum(-1)
    width = since.shape[-1]
    later = torch.ones(width, width, dtype=torch.bool, device=q.device).triu_(1)
    between = (since[..., :, None] - since[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    system = (k @ k.mT)[:, :, None] * between * rate[..., None]
    values = torch.cat((v, k[:, :, None] * since.exp()[..., None]), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    corrected, erased = solved.split((spec.value_dim, spec.key_dim), dim=-1)
    return _Solved(
        corrected=corrected,
        erased=erased,
        queries=q[:, :, None] * since.exp()[..., None],
        keys=k[:, :, None] * (since[..., -1:] - since).exp()[..., None],
        scores=(q @ k.mT)[:, :, None] * between,
        decay=since[..., -1].exp()[..., None, None],
    )


def _grouped(x: Tensor, dim: int, spec: DeltaSpec) -> Tensor:
    """x with its dimension of value heads split into key heads and the values of each."""
    return x.view(*x.shape[:dim], spec.num_key_heads, -1, *x.shape[dim + 1 :])


def _ids(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
