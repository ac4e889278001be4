"""Mixtures of experts (Shazeer et al. 2017, section 2): a router chooses a few MLPs for each token and adds them up.

Families differ in data (`ExpertSpec`). Routing is computed in float32 whatever the model's dtype, equal scores go to
the lowest expert, and a token's experts are added in the order of their scores, so that an answer does not depend on
the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoints.stacked_experts import StackLayout
from engine.quant.base import Linear

_TINY = 1e-20
"""Added to a sum of scores that is divided by, as the families with sigmoid scores do: all may be zero."""

_GROUPED_KERNELS, _MOST_GROUPS = (9, 10), 1024
"""Major compute capabilities for which torch has a kernel of grouped products, and its most groups."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """How a family routes tokens, and the sizes of its experts.

    Attributes:
        num_experts, top_k: experts of a layer, and how many of them compute a token.
        intermediate_size: of one expert.
        layers: per layer, whether its MLP is a mixture.
        scoring: of the router's product with a token: over all experts, or each for itself.
        renormalize: the weights of a token's experts are divided by their sum.
        num_groups, top_groups: experts are chosen from the `top_groups` groups of neighbours (of `num_groups` equal
            ones) whose `group_scores` best scores have the largest sum: two (DeepSeek-AI 2024, DeepSeek-V3, section
            2.1.2), or one (DeepSeek-V2, section 2.2.2).
        scale: factor of the weights.
        scales_inputs: the weights are factors of what the experts read, not of their results (Llama 4).
        has_correction: a bias is added to the scores for choosing, not to the weights (DeepSeek-V3, equation 16).
        has_bias: the router's product has a bias, and each expert's products have.
        stack_layout: of checkpoints that store all experts of a layer as one tensor.
        shared_size: intermediate size of the MLP that computes every token besides; 0: there is none.
        has_shared_gate: its output is multiplied by the sigmoid of a product with the token.
        joins_mlp: the layer has its MLP, too, and both results join the residual together (`JoinedExperts`). The router
            reads the residual, and an expert's weight has a factor.
        held: per layer, the experts whose weights this process holds, equally many in each; None: all.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
    scale: float = 1.0
    scales_inputs: bool = False
    has_correction: bool = False
    has_bias: bool = False
    stack_layout: StackLayout = "rows"
    shared_size: int = 0
    has_shared_gate: bool = False
    joins_mlp: bool = False
    held: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_held(self) -> int:
        """Experts of a layer that this process holds."""
        return self.num_experts if self.held is None else len(self.held[0])

    def num_parameters(self, hidden_size: int, experts: int, *, has_gates: bool = True) -> int:
        """Weights of a mixture with so many of its experts, the router and the shared MLP included, but not an MLP that
        it stands beside."""
        inner = experts * self.intermediate_size + self.shared_size
        router = self.num_experts * (hidden_size + self.has_correction) + hidden_size * self.has_shared_gate
        biases = self.num_experts + experts * (2 * self.intermediate_size + hidden_size)
        joined = (4 * hidden_size + self.num_experts) * self.joins_mlp  # norms, and factors of experts
        return (2 + has_gates) * hidden_size * inner + router + joined + biases * self.has_bias

    def route(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: float32 [T, num_experts], the router's.  correction: float32 [num_experts].

        Returns:
            weights float32 and experts int64 [T, top_k], best first.
        """
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ranked = scores if correction is None else scores + correction
        if self.num_groups > 1:
            ranked = self._in_best_groups(ranked)
        # Not topk, which orders equal scores as it happens.
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights * self.scale, chosen

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """Scores of experts outside of the best groups become -inf."""
        grouped = ranked.view(len(ranked), self.num_groups, -1)
        of_groups = grouped.topk(self.group_scores, dim=-1).values.sum(-1)
        best = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_groups]
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


class ExpertRows(NamedTuple):
    """The rows of a step's mixture, each a pair of token and expert, sorted by expert.

    Attributes:
        order: int64 [rows]: the index of row i among the T * top_k pairs token by token.
        ends: int32 [num_experts]: the rows of expert e end before ends[e], where those of e + 1 begin.
    """

    order: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int) -> ExpertRows:
        """Of the experts int64 [T, top_k] of each token, T * top_k rows. Nothing is read on the host."""
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(num_experts, device=chosen.device)
        return cls(order, torch.searchsorted(experts, numbers, right=True, out_int32=True))

    @classmethod
    def of_held(cls, chosen: Tensor, index: Tensor, num_held: int) -> ExpertRows:
        """Of the experts that this process holds only: `index` as of `Experts`. Reads the number of rows on the
        host."""
        order, ends = cls.of(index[chosen], num_held)  # the others' rows come last
        return cls(order[: int(ends[-1])], ends)

    def take(self, x: Tensor, top_k: int) -> Tensor:
        """The rows' inputs [rows, hidden] of tokens x [T, hidden]."""
        return x.index_select(0, self.order // top_k)

    def restore(self, rows: Tensor, tokens: int, top_k: int) -> Tensor:
        """Rows [rows, hidden] in the tokens' order: [tokens, top_k, hidden], zeros for pairs without a row."""
        whole = len(rows) == tokens * top_k
        pairs = torch.empty_like(rows) if whole else rows.new_zeros(tokens * top_k, rows.shape[1])
        return pairs.index_copy_(0, self.order, rows).view(tokens, top_k, rows.shape[1])


class ExpertLinear(Protocol):
    """A product with a weight for each expert, whatever their storage."""

    @property
    def recordable(self) -> bool:
        """Whether it never reads a value on the host."""
        ...

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """[rows, in_features] sorted by expert, with `ExpertRows.ends` -> a new [rows, out_features], in x's dtype."""
        ...


class LinearPerExpert:
    """Each expert's product by itself; those without rows are skipped."""

    __slots__ = ("linears",)
    recordable = False

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        parts, first = [], 0
        for linear, end in zip(self.linears, ends.tolist(), strict=True):
            if first < end:
                parts.append(linear(x[first:end]))
            first = end
        if not parts:
            return x.new_empty(0, self.linears[0].out_features)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class GroupedLinear:
    """All experts' products in one kernel, which reads the rows' bounds on the device; on GPUs for which torch has
    none, in one call that reads them on the host."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """From weight [num_experts, out_features, in_features] and bias [num_experts, out_features]."""
        self.weight = weight
        self.bias = bias

    @property
    def recordable(self) -> bool:
        device = self.weight.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _GROUPED_KERNELS

    @staticmethod
    def runs(weight: Tensor, num_experts: int) -> bool:
        """Whether the kernel multiplies with weights like this expert's [out_features, in_features]: bfloat16, rows of
        whole 16 bytes."""
        whole = all(size * weight.element_size() % 16 == 0 for size in weight.shape)
        usual = weight.dtype == torch.bfloat16 and num_experts <= _MOST_GROUPS
        return weight.device.type == "cuda" and usual and whole

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        if not len(x):  # none of a step's tokens chose an expert that this process holds
            return x.new_empty(0, self.weight.shape[1])
        y = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        if self.bias is None:
            return y
        rows = torch.arange(len(x), dtype=ends.dtype, device=x.device)
        return y.add_(self.bias.index_select(0, torch.searchsorted(ends, rows, right=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """An MLP's weights.

    Attributes:
        gate_up: hidden -> 2 * intermediate, or intermediate without a gate.  down: intermediate -> hidden.
    """

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture's weights.

    Attributes:
        router: float32 [num_experts, hidden].  router_bias, correction: float32 [num_experts].
        gate_up, down: as of `Mlp`, of each expert that this process holds.
        expert_scale: float32 [num_experts], factors of the experts' weights.
        index: int64 [num_experts], each expert's index among those that this process holds, their number for another
            one; None: it holds all.
        rows: int64 [num_experts], tokens that each expert was chosen for so far; None: they are not counted.
        shared: computes every token.  shared_gate: float32 [1, hidden].
    """

    router: Tensor
    gate_up: ExpertLinear
    down: ExpertLinear
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    shared: Mlp | None = None
    shared_gate: Tensor | None = None
    expert_scale: Tensor | None = None
    index: Tensor | None = None
    rows: Tensor | None = None

    def route(self, spec: ExpertSpec, x: Tensor) -> tuple[Tensor, Tensor]:
        """`ExpertSpec.route` of tokens x [T, hidden]."""
        return self.choose(spec, F.linear(x.float(), self.router, self.router_bias))

    def choose(self, spec: ExpertSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`ExpertSpec.route` of the router's logits, float32 [T, num_experts]."""
        weights, chosen = spec.route(logits, self.correction)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        if self.rows is not None:
            self.rows.index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        return weights, chosen


class WholeMixture(Protocol):
    """A mixture that is computed in one call, whatever its form."""

    def __call__(self, x: Tensor, routed: Tensor, /) -> Tensor:
        """[T, hidden_size] of what the experts read, and float32 of what the router reads -> a new [T, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class JoinedExperts:
    """A mixture beside a layer's MLP (Gemma 4). All norms are float32 [hidden].

    Attributes:
        experts: whose router reads the normed residual: its weight includes that norm's.
        input_norm: of the residual, for the experts.
        output_norm, mlp_norm: of what the experts make, and of what the MLP makes, before both are added.
    """

    experts: Experts | WholeMixture
    input_norm: Tensor
    output_norm: Tensor
    mlp_norm: Tensor


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """float32 [T, hidden]: outputs [T, top_k, hidden] of each token's experts times weights [T, top_k], added in their
    order, which a reduction would not promise."""
    total = outputs[:, 0] * weights[:, :1]
    for rank in range(1, outputs.shape[1]):
        total = total.addcmul_(outputs[:, rank].float(), weights[:, rank, None])
    return total
