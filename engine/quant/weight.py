"""The common form of a quantized weight, which all readers return and all kernels accept.

Readers (`engine.quant.formats`) convert a format's specifics: the order of packed numbers, the storage of zeros, the
tensors of a weight. Kernels convert the common form to their device's layout. Conversion to it rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Form = Literal["int4", "int8", "fp8"]
"""What a weight's elements are: 0 to 15, -128 to 127, or float8_e4m3fn."""


_ELEMENTS_AT_ONCE = 1 << 22
"""Of a weight, held in float32 while it is dequantized."""


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevel:
    """Factors that are small integers times a float for each few of them, as in llama.cpp's K-quants.

    Attributes:
        codes: int8 or uint8 [n, groups].
        step: float16 [n, ceil(groups / per)].
        per: groups that share a step.
    """

    codes: Tensor
    step: Tensor
    per: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.step.nbytes

    def float(self) -> Tensor:
        """float32 [n, groups]."""
        steps = self.step.float().repeat_interleave(self.per, dim=1)[:, : self.codes.shape[1]]
        return steps * self.codes.float()


Factors = Tensor | TwoLevel
"""A number for each group: float16, bfloat16 or float32 [n, groups], or in two levels."""


@dataclass(frozen=True, slots=True)
class Activations:
    """A checkpoint's quantization of a product's inputs.

    Attributes:
        form: to what.
        scale: the one that was calibrated; None: each row by its own largest, as it comes.
    """

    form: Literal["int8", "fp8"]
    scale: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QWeight:
    """W [n, k] with w[i, j] = scale[i, g] * code[i, j] + low[i, g], where g = j // group.

    Attributes:
        form: of the codes.
        codes: int4: uint8 [n, ceil(k / 2)], the even column in the lower half. int8: int8 [n, k]. fp8: float8_e4m3fn
            [n, k].
        n, k: rows (out features) and columns (in features).
        group: columns that share a factor; k: a row has one.
        scale, low: [n, ceil(k / group)]; `low` None: zero.
        order: int64 [k]: column j multiplies the input's element order[j] (GPTQ's activation order); None: j.
        activations: how inputs should be quantized; None: not at all.
    """

    form: Form
    codes: Tensor
    n: int
    k: int
    group: int
    scale: Factors
    low: Factors | None = None
    order: Tensor | None = None
    activations: Activations | None = None

    @property
    def groups(self) -> int:
        """Along a row."""
        return -(-self.k // self.group)

    @property
    def nbytes(self) -> int:
        """Of all that is stored."""
        parts = (self.codes, self.scale, self.low, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def kind(self) -> str:
        """Its form in words, for messages."""
        groups = "a factor a row" if self.groups == 1 else f"groups of {self.group}"
        inputs = "" if self.activations is None else f", {self.activations.form} activations"
        return f"{self.form}, {groups}{inputs}"

    def integers(self) -> Tensor:
        """The codes one by one: uint8 or int8 [n, k], or float8_e4m3fn."""
        if self.form != "int4":
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=2)
        return halves.reshape(self.n, -1)[:, : self.k]

    def dequantize(self, dtype: torch.dtype = torch.float32, into: Tensor | None = None) -> Tensor:
        """W [n, k], each element computed in float32 and rounded once; columns in the input's order.

        Args:
            into: [n, k] of any float dtype, to be filled instead of a new tensor of `dtype`. Only some rows at a time
                are held in float32.
        """
        if into is None:
            into = torch.empty(self.n, self.k, dtype=dtype, device=self.codes.device)
        step = max(1, _ELEMENTS_AT_ONCE // max(1, self.k))
        for first in range(0, self.n, step):
            part = self.rows(first, min(self.n, first + step))
            into[first : first + step].copy_(part._floats())
        return into

    def rows(self, first: int, end: int) -> QWeight:
        """The rows from `first` up to `end`, as views."""
        return self._each(lambda tensor: tensor[first:end], end - first)

    def take(self, index: Tensor) -> QWeight:
        """The rows that int64 `index` names, in its order, as copies."""
        return self._each(lambda tensor: _taken(tensor, index), len(index))

    def to(self, device: torch.device) -> QWeight:
        """The same on another device."""
        moved = self._each(lambda tensor: tensor.to(device), self.n)
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    def equals(self, other: QWeight) -> bool:
        """Whether both are stored alike, element by element (the same numbers stored otherwise don't count)."""
        if (self.form, self.n, self.k, self.group) != (other.form, other.n, other.k, other.group):
            return False
        mine, theirs = _tensors(self), _tensors(other)
        return len(mine) == len(theirs) and all(map(_same_bytes, mine, theirs))

    def _floats(self) -> Tensor:
        weight = self.integers().float()
        weight *= self._spread(self.scale)
        if self.low is not None:
            weight += self._spread(self.low)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight

    def _each(self, change: Callable[[Tensor], Tensor], n: int) -> QWeight:
        """With `change` made to all that has a row for each of W's, of which `n` are left."""
        return replace(
            self,
            codes=change(self.codes),
            n=n,
            scale=_changed(self.scale, change),
            low=None if self.low is None else _changed(self.low, change),
        )

    def _spread(self, factors: Factors) -> Tensor:
        """Each group's number for each of its columns: float32 [n, k], or [n, 1] where a row has one."""
        each = factors.float()
        return each if self.groups == 1 else each.repeat_interleave(self.group, dim=1)[:, : self.k]


def stack(weights: Sequence[QWeight]) -> QWeight | None:
    """The weights one above the other, exactly (q, k and v as one product); None: they are too unlike."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(w.k != first.k or not _same_order(w, first) for w in weights):
        return None
    group, activations = _common_group(weights), _common_activations(weights)
    if group is None or activations is False or len({w.form == "fp8" for w in weights}) > 1:
        return None
    form = first.form if all(w.form == first.form for w in weights) else "int8"
    lows = [w.low for w in weights]
    some_low = any(low is not None for low in lows)
    return QWeight(
        form=form,
        codes=torch.cat([w.codes if w.form == form else w.integers().to(torch.int8) for w in weights]),
        n=sum(w.n for w in weights),
        k=first.k,
        group=group,
        scale=_stacked([_regrouped(w, w.scale, group) for w in weights]),
        low=_stacked([_regrouped(w, _low(w), group) for w in weights]) if some_low else None,
        order=first.order,
        activations=activations or None,
    )


def _common_group(weights: Sequence[QWeight]) -> int | None:
    """A group's size that divides all of them."""
    smallest = min(w.group for w in weights)
    if all(w.group % smallest == 0 or w.groups == 1 for w in weights):
        return smallest
    return None


def _common_activations(weights: Sequence[QWeight]) -> Activations | Literal[False] | None:
    """How the one input of all of them is quantized: by the largest of scales that were calibrated apart. False: they
    are too unlike."""
    found = [w.activations for w in weights]
    scales = [a.scale for a in found if a is not None and a.scale is not None]
    if len({None if a is None else (a.form, a.scale is None) for a in found}) > 1:
        return False
    first = found[0]
    return first if first is None or not scales else replace(first, scale=max(scales))


def _regrouped(weight: QWeight, factors: Factors, group: int) -> Factors:
    """The factors for groups of this size, which divides the weight's own or is at most as large as its only one."""
    if weight.group == group:
        return factors
    groups = -(-weight.k // group)
    if isinstance(factors, TwoLevel) and weight.group % group == 0:
        times = weight.group // group
        return TwoLevel(factors.codes.repeat_interleave(times, 1)[:, :groups], factors.step, factors.per * times)
    each = factors.float() if isinstance(factors, TwoLevel) else factors
    if weight.groups == 1:
        return each.expand(-1, groups).contiguous()
    return each.repeat_interleave(weight.group // group, dim=1)[:, :groups].contiguous()


def _low(weight: QWeight) -> Factors:
    """The lowest values, in the shape of the scales where there are none: zeros."""
    if weight.low is not None:
        return weight.low
    if isinstance(weight.scale, TwoLevel):
        return replace(weight.scale, codes=torch.zeros_like(weight.scale.codes))
    return torch.zeros_like(weight.scale)


def _stacked(parts: Sequence[Factors]) -> Factors:
    """Stack them; in float32 where their dtypes differ."""
    if all(isinstance(part, TwoLevel) for part in parts):
        levels = [part for part in parts if isinstance(part, TwoLevel)]
        if len({(part.per, part.codes.dtype) for part in levels}) == 1:
            codes, step = torch.cat([p.codes for p in levels]), torch.cat([p.step for p in levels])
            return TwoLevel(codes, step, levels[0].per)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts) and len({part.dtype for part in tensors}) == 1:
        return torch.cat(tensors)
    return torch.cat([part.float() for part in parts])


def _changed(factors: Factors, change: Callable[[Tensor], Tensor]) -> Factors:
    if isinstance(factors, TwoLevel):
        return replace(factors, codes=change(factors.codes), step=change(factors.step))
    return change(factors)


def _taken(tensor: Tensor, index: Tensor) -> Tensor:
    if tensor.dtype == torch.float8_e4m3fn:  # which torch selects on no CPU
        return tensor.view(torch.uint8).index_select(0, index).view(torch.float8_e4m3fn)
    return tensor.index_select(0, index)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _tensors(weight: QWeight) -> list[Tensor]:
    """All that is stored, in a fixed order; a part that is missing is an empty tensor."""
    found = [weight.codes]
    for factors in (weight.scale, weight.low):
        if isinstance(factors, TwoLevel):
            found += [factors.codes, factors.step]
        else:
            found.append(torch.empty(0) if factors is None else factors)
    return [*found, torch.empty(0) if weight.order is None else weight.order]


def _same_order(one: QWeight, other: QWeight) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return torch.equal(one.order, other.order)
