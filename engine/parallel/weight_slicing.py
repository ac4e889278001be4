"""A rank's shard of a checkpoint: a `WeightSource` that reads only the rank's weights.

Of a safetensors file nothing else is read. Where a format stores numbers packed, or the file is GGUF, one tensor at a
time is unpacked whole and sliced; only the slice is retained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import PartSource, WeightSource
from engine.errors import CorruptWeights, UnsupportedModel
from engine.parallel.sharding import Share, TensorShard
from engine.quant.formats.base import halves
from engine.quant.weight import Factors, QWeight, TwoLevel


class ShareOfWeights:
    """The part of `source` that a rank has."""

    def __init__(self, source: WeightSource, share: Share) -> None:
        self._source = source
        self._share = share

    @property
    def names(self) -> Collection[str]:
        return [name for name in self._source.names if self._share.has(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the shard. The whole tensor must have the config's shape."""
        whole = list(self._source.shape(name))
        cut = self._share.cut(name)
        if cut is None:
            return tuple(whole)
        if cut.axis >= len(whole) or cut.end > whole[cut.axis] or not self._is_whole(name, whole[cut.axis], cut):
            raise CorruptWeights(f"tensor {name} has shape {whole}, which the config doesn't ask for")
        whole[cut.axis] = cut.end - cut.first
        return tuple(whole)

    def read(self, name: str, into: Tensor) -> None:
        if self._share.rank and self._share.is_added_once(name):
            into.zero_()
            return
        cut = self._share.cut(name)
        if cut is None:
            self._source.read(name, into)
        elif isinstance(self._source, PartSource):
            self._source.read_part(name, cut.axis, cut.first, cut.end, into)
        else:
            whole = torch.empty(self._source.shape(name), dtype=into.dtype)
            self._source.read(name, whole)
            into.copy_(whole.narrow(cut.axis, cut.first, cut.end - cut.first))

    def quantized(self, name: str) -> QWeight | None:
        weight, cut = self._source.quantized(name), self._share.cut(name)
        if weight is None or cut is None:
            return weight
        if cut.axis == 0:
            return weight.take(torch.arange(cut.first, cut.end))
        return columns(weight, cut.first, cut.end, name)

    def _is_whole(self, name: str, found: int, cut: TensorShard) -> bool:
        """Whether an axis has as many elements as all ranks together read."""
        width = cut.end - cut.first
        if ".k_proj." in name or ".v_proj." in name:
            return found == self._share.key_rows(name)
        if cut == self._share.vocabulary and cut.axis == 0 and ".layers." not in name:
            return found == self._share.spec.vocab_size
        return found == width * self._share.size


def columns(weight: QWeight, first: int, end: int, name: str) -> QWeight:
    """The columns from `first` up to `end`, as copies. Groups that don't end there become smaller ones with the same
    factors, so that each element stays what it was.

    Raises:
        UnsupportedModel: its columns are in an order of their own, so that groups can't be separated by position.
    """
    if weight.order is not None:
        raise UnsupportedModel(
            f"{name} is stored in activation order (GPTQ's desc_act), which can't be shared by several devices; "
            "use --tensor-parallel 1, or --quantize dense"
        )
    k = end - first
    if weight.groups == 1:
        codes, group = _codes(weight, first, end), k
        return replace(weight, codes=codes, k=k, group=group)
    group = gcd(weight.group, first) if end == weight.k else gcd(gcd(weight.group, first), end)
    times = weight.group // group
    places = first // group, -(-end // group)
    return replace(
        weight,
        codes=_codes(weight, first, end),
        k=k,
        group=group,
        scale=_factors(weight.scale, times, *places),
        low=None if weight.low is None else _factors(weight.low, times, *places),
    )


def _codes(weight: QWeight, first: int, end: int) -> Tensor:
    if weight.form != "int4":
        return weight.codes[:, first:end].clone(memory_format=torch.contiguous_format)
    if first % 2:
        return halves(weight.integers()[:, first:end])
    packed = weight.codes[:, first // 2 : -(-end // 2)].clone(memory_format=torch.contiguous_format)
    if end % 2:
        packed[:, -1] &= 15  # the upper half is another rank's
    return packed


def _factors(factors: Factors, times: int, first: int, end: int) -> Factors:
    """Those of groups first ... end - 1, after each group was cut into `times`."""
    if isinstance(factors, Tensor):
        whole = factors if times == 1 else factors.repeat_interleave(times, dim=1)
        return whole[:, first:end].clone(memory_format=torch.contiguous_format)
    per = factors.per * times
    if first % per:
        return _factors(factors.float(), times, first, end)
    codes = factors.codes if times == 1 else factors.codes.repeat_interleave(times, dim=1)
    step = factors.step[:, first // per : -(-end // per)]
    return TwoLevel(codes[:, first:end].contiguous(), step.clone(memory_format=torch.contiguous_format), per)
