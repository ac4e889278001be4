"""Weights laid out for the kernels: panels of columns, and for quantized ones their codes and factors as they are.

Packing allocates nothing of the size of a dense weight: floats are packed some rows at a time, codes byte by byte, and
a row map interleaves rows that must be adjacent (gate and up).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import CorruptWeights
from engine.native.library import NativeLibrary
from engine.native.structs import ElementKind, FactorForm, FactorsStruct, LinearStruct
from engine.native.workspace import QUANT_GROUP
from engine.quant.weight import Factors, QWeight, TwoLevel

_ROWS_AT_ONCE = 4096
"""Weight rows that are held in float32 while they are packed."""

_ROOM = 64
"""Bytes after the last panel, of which kernels may read some."""

_SMALL = {"int4": ElementKind.Q4, "int8": ElementKind.Q8, "fp8": ElementKind.E4M3}
_NAMES = {ElementKind.F32: "float32", ElementKind.BF16: "bfloat16", ElementKind.Q4: "int4", ElementKind.E4M3: "fp8"}
_FORMS = {torch.float16: FactorForm.F16, torch.bfloat16: FactorForm.BF16, torch.float32: FactorForm.F32}
_TWO_LEVEL = {torch.int8: FactorForm.TWO_I8, torch.uint8: FactorForm.TWO_U8}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in panels.

    Attributes:
        kind: of its elements.
        n, k: out and in features.
        struct: for the kernels; points into `tensors`.
        tensors: all that is stored.
        looked_up: its rows are embeddings, too.
    """

    kind: ElementKind
    n: int
    k: int
    struct: LinearStruct
    tensors: tuple[Tensor, ...]
    looked_up: bool = False

    @property
    def form(self) -> str:
        """Public name of its elements: "int4", "bfloat16", …"""
        return _NAMES.get(self.kind, "int8")

    @property
    def nbytes(self) -> int:
        """Of the elements with their factors and bias."""
        return sum(tensor.nbytes for tensor in self.tensors)


def runs_small(weight: QWeight) -> bool:
    """Whether the kernels multiply with a quantized weight as it is: a word's two elements must share their factors."""
    steps = [part.step.dtype for part in (weight.scale, weight.low) if isinstance(part, TwoLevel)]
    return (weight.groups == 1 or weight.group % 2 == 0) and all(dtype == torch.float16 for dtype in steps)


def pack_dense(
    library: NativeLibrary, kind: ElementKind, weight: Tensor, bias: Tensor | None, *, is_lasting: bool = True
) -> PackedWeight:
    """Weight [n, k] of any float dtype as `kind`, which is quantized here for I8 and W8. `is_lasting`: it is a part of
    the model; others have memory of their own."""
    n, k = weight.shape
    padded = _padded(n, library.panel)
    words = {ElementKind.F32: k, ElementKind.I8: -(-k // 4)}.get(kind, -(-k // 2))
    row_bytes = words * (2 if kind == ElementKind.W8 else 4)
    size = padded * row_bytes + _ROOM
    packed = library.weight_memory.take(size) if is_lasting else torch.zeros(size, dtype=torch.uint8)
    packed = packed.view(torch.int32)
    quantized = kind in (ElementKind.I8, ElementKind.W8)
    scale = torch.empty(padded, dtype=torch.float32) if quantized else None
    offset = torch.empty(-(-k // QUANT_GROUP), padded, dtype=torch.int32) if kind == ElementKind.I8 else None
    rows = _ROWS_AT_ONCE // library.panel * library.panel
    for at in range(0, n, rows):
        part = weight[at : at + rows].to(torch.float32).contiguous()
        scales, offsets = (None if t is None else t[..., at:] for t in (scale, offset))
        library.pack(kind, part, packed[at * row_bytes // 4 :], scales, offsets)
    struct = LinearStruct(kind, n, k, words)
    return _packed(library, struct, {"packed": packed, "scale": scale, "offset": offset}, bias)


def pack_quantized(
    library: NativeLibrary, weight: QWeight, bias: Tensor | None = None, *, gated: bool = False, looked_up: bool = False
) -> PackedWeight:
    """A quantized weight that `runs_small`, code by code.

    An int8 weight with a factor a row and int8 activations multiplies rows that are quantized as they come, with scales
    by groups, which are finer than one that was calibrated.

    Args:
        gated: gate above up, to be interleaved by vectors; the bias is so already.
        looked_up: its rows are embeddings, too, so it stays a small weight.

    Raises:
        CorruptWeights: a code is no number.
    """
    if weight.form == "fp8" and bool(weight.codes.view(torch.uint8).bitwise_and(127).eq(127).any()):
        raise CorruptWeights("an fp8 weight holds NaN")
    rows = panel_rows(library, weight.n, gated=gated)
    n = rows.numel() if gated else weight.n
    kind = ElementKind.I8 if _multiplies_int8(weight) and not looked_up else _SMALL[weight.form]
    k = weight.k
    words = -(-k // (4 if kind == ElementKind.I8 else 2))
    row_bytes = {ElementKind.I8: 4 * words, ElementKind.Q4: -(-words // 8) * 8}.get(kind, 2 * words)
    packed = library.weight_memory.take(rows.numel() * row_bytes + _ROOM).view(torch.int32)
    offset = torch.empty(-(-k // QUANT_GROUP), rows.numel(), dtype=torch.int32) if kind == ElementKind.I8 else None
    library.pack_codes(kind, k, weight.codes.contiguous(), rows, packed, offset)
    struct = LinearStruct(kind, n, k, words)
    parts: dict[str, Tensor | None] = {"packed": packed, "offset": offset}
    if kind == ElementKind.I8:
        assert isinstance(weight.scale, Tensor)
        parts["scale"] = _panels(weight.scale.float(), rows, library.panel).reshape(-1)
        return _packed(library, struct, parts, bias)
    struct.group = k if weight.groups == 1 else weight.group
    panels = _factors(struct.scales, weight.scale, rows, library.panel)
    if weight.low is not None:
        panels += _factors(struct.lows, weight.low, rows, library.panel)
    if weight.order is not None:
        parts["order"] = weight.order.to(torch.int32).contiguous()
    return replace(_packed(library, struct, parts, bias, panels), looked_up=looked_up)


def _multiplies_int8(weight: QWeight) -> bool:
    if weight.form != "int8" or weight.activations is None or weight.activations.form != "int8":
        return False
    return weight.groups == 1 and weight.low is None and weight.order is None and isinstance(weight.scale, Tensor)


def panel_rows(library: NativeLibrary, n: int, *, gated: bool) -> Tensor:
    """int32 [padded n]: the row of W [n, k] that is each column of the panels; -1: none. `gated`: gate above up, to be
    interleaved by vectors."""
    if not gated:
        rows = torch.full((_padded(n, library.panel),), -1, dtype=torch.int32)
        rows[:n] = torch.arange(n)
        return rows
    lanes, half = library.panel // 2, n // 2
    gate = torch.full((_padded(half, lanes),), -1, dtype=torch.int32)
    gate[:half] = torch.arange(half)
    up = torch.where(gate < 0, gate, gate + half)
    return torch.stack((gate.view(-1, lanes), up.view(-1, lanes)), dim=1).reshape(-1)


def _factors(struct: FactorsStruct, factors: Factors, rows: Tensor, panel: int) -> list[Tensor]:
    """Fills the struct; returns what it points to."""
    if isinstance(factors, TwoLevel):
        panels = [_panels(factors.codes, rows, panel), _panels(factors.step, rows, panel)]
        struct.form, struct.per = _TWO_LEVEL[factors.codes.dtype], factors.per
        struct.steps = panels[1].data_ptr()
    else:
        panels = [_panels(factors, rows, panel)]
        struct.form = _FORMS[factors.dtype]
    struct.values = panels[0].data_ptr()
    return panels


def _panels(factors: Tensor, rows: Tensor, panel: int) -> Tensor:
    """[n, groups] -> [panels, groups, panel], zeros where a panel has no row."""
    taken = factors.index_select(0, rows.clamp(min=0).long())
    taken[rows < 0] = 0
    return taken.view(-1, panel, factors.shape[1]).transpose(1, 2).contiguous()


def _packed(
    library: NativeLibrary,
    struct: LinearStruct,
    parts: dict[str, Tensor | None],
    bias: Tensor | None,
    panels: list[Tensor] | None = None,
) -> PackedWeight:
    if bias is not None:
        parts["bias"] = padded_bias = torch.zeros(_padded(struct.n, library.panel), dtype=torch.float32)
        padded_bias[: bias.shape[0]] = bias
    stored = {name: tensor for name, tensor in parts.items() if tensor is not None}
    for name, tensor in stored.items():
        setattr(struct, name, tensor.data_ptr())
    return PackedWeight(ElementKind(struct.kind), struct.n, struct.k, struct, (*stored.values(), *(panels or ())))


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to
