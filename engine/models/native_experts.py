"""A layer's mixture of experts in native code; see engine/native/csrc/experts.h."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.models.experts import Experts, ExpertSpec, LinearPerExpert
from engine.models.layer_ops import Activation
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.structs import KIND_OF, ElementKind, ExpertsStruct, Gate, LinearStruct, Scoring
from engine.native.workspace import ExpertSizes, KernelWorkspace
from engine.quant.base import Linear


class NativeExperts:
    """A mixture whose products are `NativeLinear`s, one for each expert.

    Attributes:
        struct: for the kernels; points into what lives as long as this object.
        linears: all its products: of the experts, the shared one, and the router.
        sizes: what it needs room for.
        reorders: some product's columns are in an order of their own.
        rows: int64 [num_experts], that each expert has computed so far.
    """

    __slots__ = (
        "_correction", "_down", "_gate_up", "_library", "_mlp", "_router", "_spec", "linears", "reorders", "rows",
        "sizes", "struct",
    )  # fmt: skip

    def __init__(self, library: NativeLibrary, spec: ExpertSpec, mlp: Experts) -> None:
        self._library = library
        gate_up, down = _experts(mlp.gate_up), _experts(mlp.down)
        if mlp.shared is not None:
            gate_up.append(_native(mlp.shared.gate_up))
            down.append(_native(mlp.shared.down))
        weight = mlp.router if mlp.shared_gate is None else torch.cat((mlp.router, mlp.shared_gate))
        self._router = router = NativeLinear.dense(library, ElementKind.F32, weight, mlp.router_bias)
        self._spec, self._mlp = spec, mlp
        self.linears = (*gate_up, *down, router)
        self.reorders = any(linear.reorders for linear in self.linears)
        self.rows = torch.zeros(spec.num_experts, dtype=torch.int64)
        self.sizes = ExpertSizes(spec.num_experts, spec.top_k, spec.intermediate_size, spec.shared_size)
        self._gate_up, self._down = _structs(gate_up), _structs(down)
        self._correction = None if mlp.correction is None else mlp.correction.contiguous()
        self.struct = ExpertsStruct(
            spec.num_experts, spec.top_k, Scoring[spec.scoring.upper()], spec.renormalize, spec.num_groups,
            spec.top_groups, mlp.shared is not None, mlp.shared_gate is not None, spec.scale, spec.scales_inputs,
            spec.group_scores, spec.joins_mlp, self._gate_up,
            self._down, router.struct, None if self._correction is None else self._correction.data_ptr(),
            self.rows.data_ptr(),
        )  # fmt: skip

    def workspace(
        self, library: NativeLibrary, hidden: int, activations: ElementKind, max_rows: int, *, reorders: bool
    ) -> KernelWorkspace:
        """Buffers of `product`, also of other mixtures with the same sizes. `reorders`: of any of them."""
        return KernelWorkspace.for_experts(library, self.sizes, hidden, activations, max_rows, reorders=reorders)

    def product(
        self, x: Tensor, activation: Activation = "silu", space: KernelWorkspace | None = None,
        routed: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """float32 [rows, hidden] for x [rows, hidden] in the dtype that the experts multiply, by themselves and not as
        a part of a decoder's step.

        Args:
            space: of `workspace`; None: it is made.
            routed: float32 [rows, hidden], read by the router, with `ExpertSpec.joins_mlp`; else it reads x.
        """
        rows, hidden = x.shape
        y = torch.empty(rows, hidden, dtype=torch.float32)
        if rows:
            kind = KIND_OF[x.dtype]
            space = space or self.workspace(self._library, hidden, kind, rows, reorders=self.reorders)
            if routed is not None:
                weights, chosen = self._mlp.choose(self._spec, self._router.product(routed, space))
                _copy(weights, space.struct.factors)
                _copy(chosen.int(), space.struct.chosen)
            self._library.experts(kind, self.struct, x.contiguous(), y, space.struct, Gate[activation.upper()])
        return y


def _copy(values: Tensor, address: int) -> None:
    values = values.contiguous()
    ctypes.memmove(address, values.data_ptr(), values.nbytes)


def _experts(products: object) -> list[NativeLinear]:
    assert isinstance(products, LinearPerExpert)
    return [_native(linear) for linear in products.linears]


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def _structs(linears: list[NativeLinear]) -> ctypes.Array[LinearStruct]:
    return (LinearStruct * len(linears))(*(linear.struct for linear in linears))
