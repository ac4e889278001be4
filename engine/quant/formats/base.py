"""Common parts of the formats of quantized checkpoints: the conversion of modules' tensors to logical weights.

A format names the suffixes of the tensors of one weight and builds a `QWeight` from them. Here they are replaced by
`module.weight`, so that the code outside of this folder does not depend on a format's storage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.logs import get_logger
from engine.quant.weight import Activations, QWeight

logger = get_logger(__name__)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_CACHE_SCALES = (
    ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point",
    ".k_proj.output_scale", ".v_proj.output_scale",
)  # fmt: skip
"""Endings of what was calibrated for a quantized KV cache; ours measures its scales itself."""


class StoredTensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor:
        """As it is stored, of any dtype, on the CPU."""
        ...

    def read(self, name: str, into: Tensor) -> None:
        """Copy a tensor of a float dtype into `into`."""
        ...


class Format(Protocol):
    """How one method stores the weights of a module (`model.layers.0.mlp.down_proj`)."""

    @property
    def markers(self) -> Sequence[str]:
        """Suffixes of tensors that identify a quantized module: it has one of them."""
        ...

    @property
    def parts(self) -> Sequence[str]:
        """Endings of all tensors that belong to a quantized weight, markers included."""
        ...

    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of the weight, from what headers say.

        Raises:
            CorruptWeights, UnsupportedModel: naming the tensor.
        """
        ...

    def weight(self, module: str) -> QWeight:
        """The weight.

        Raises:
            CorruptWeights, UnsupportedModel: a tensor is missing, or of the wrong shape or dtype; names it.
        """
        ...


class QuantizedCheckpoint:
    """A `WeightSource` of a quantized checkpoint: each module's tensors appear as one weight."""

    def __init__(self, stored: StoredTensors, form: Format) -> None:
        self._stored = stored
        self._form = form
        endings = tuple(form.markers)
        self._modules = {
            name.removesuffix(marker): name
            for name in stored.names
            if name.endswith(endings)
            for marker in endings
            if name.endswith(marker)
        }
        scales = {name for name in stored.names if name.endswith(_CACHE_SCALES)}
        parts = {f"{module}{ending}" for module in self._modules for ending in form.parts}
        self._names = {*stored.names} - parts - scales | {f"{module}.weight" for module in self._modules}
        if scales := scales - parts:
            logger.info("scales of a quantized KV cache are not read: ours are measured", tensors=len(scales))

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        module = self._module(name)
        return self._stored.shape(name) if module is None else self._form.shape(module)

    def read(self, name: str, into: Tensor) -> None:
        module = self._module(name)
        if module is None:
            self._stored.read(name, into)
        else:
            self._form.weight(module).dequantize(into=into)

    def quantized(self, name: str) -> QWeight | None:
        module = self._module(name)
        return None if module is None else self._form.weight(module)

    def _module(self, name: str) -> str | None:
        """The quantized module whose weight this is."""
        module = name.removesuffix(".weight")
        return module if module != name and module in self._modules else None


def part(stored: StoredTensors, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None) -> Tensor:
    """A tensor that belongs to a quantized weight; with `shape`, one of that shape.

    Raises:
        CorruptWeights: it is missing, or of another dtype or shape.
    """
    found = part_shape(stored, name)
    if shape is not None and found != tuple(shape):
        raise CorruptWeights(f"tensor {name} has shape {list(found)}, but its quantization asks for {list(shape)}")
    tensor = stored.tensor(name)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CorruptWeights(f"tensor {name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
    return tensor


def part_shape(stored: StoredTensors, name: str) -> tuple[int, ...]:
    """The shape of a tensor that must be there."""
    if name not in stored.names:
        raise CorruptWeights(f"tensor {name} is missing from the checkpoint")
    return stored.shape(name)


def unpacked(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The numbers of 4 or 8 bits in int32 words [rows, columns], lowest bits first: uint8 [rows, columns * 32 / bits].

    Args:
        order: the column within a word that each number, from the lowest bits up, stands for; None: in order.
    """
    whole = words.contiguous().view(torch.uint8)
    if bits == 4:
        whole = torch.stack((whole & 15, whole >> 4), dim=2).reshape(len(words), -1)
    if order is not None:
        index = torch.tensor(order).argsort()
        whole = whole.view(len(words), -1, len(order))[:, :, index].reshape(len(words), -1)
    return whole


def affine(
    codes: Tensor,
    bits: int,
    scale: Tensor,
    zero: Tensor | None,
    group: int,
    order: Tensor | None = None,
    activations: Activations | None = None,
) -> QWeight:
    """The weight scale * (code - zero).

    Args:
        codes: uint8 [n, k] of 4 or 8 bits.
        scale: float [n, groups].  zero: of an integer dtype, likewise; None: the middle of the codes.
    """
    n, k = codes.shape
    middle = 1 << (bits - 1)
    if bits == 8:
        zero = None if zero is None else zero.to(torch.int32) - middle
        low = None if zero is None or not zero.any() else _narrowed(scale.float() * -zero, scale.dtype)
        whole = (codes ^ 128).contiguous().view(torch.int8)
        return QWeight("int8", whole, n, k, group, scale, low, order, activations)
    low = scale.float() * (-middle if zero is None else -zero.to(torch.int32))
    return QWeight("int4", halves(codes), n, k, group, scale, _narrowed(low, scale.dtype), order, activations)


def halves(codes: Tensor) -> Tensor:
    """uint8 [n, ceil(k / 2)] of codes [n, k] of 4 bits, the even column in the lower half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()  # what was unpacked along rows lies across


def column_order(groups: Tensor, name: str, group: int, count: int) -> Tensor | None:
    """int64 [k]: the columns sorted by the group that each belongs to; None: they lie in order.

    Args:
        groups: of each column, int [k], from the tensor `name`.
        group: columns that each group must have, but for what is left for the last one.  count: of groups.

    Raises:
        CorruptWeights: a group is none of them or has another number of columns.
    """
    k = len(groups)
    if not bool(((groups >= 0) & (groups < count)).all()):
        raise CorruptWeights(f"tensor {name} names group {int(groups.max())} or a negative one; there are {count}")
    sizes = torch.bincount(groups.long(), minlength=count)
    wanted = torch.full((count,), group)
    wanted[-1] = k - group * (count - 1)
    if not torch.equal(sizes, wanted):
        odd = int((sizes != wanted).nonzero()[0])
        raise CorruptWeights(f"tensor {name} gives group {odd} {int(sizes[odd])} columns, not {int(wanted[odd])}")
    order = torch.sort(groups.long(), stable=True).indices
    return None if torch.equal(order, torch.arange(k)) else order


def _narrowed(low: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 factors in a smaller dtype, if that holds them exactly."""
    small = low.to(dtype)
    return small if torch.equal(small.float(), low) else low
