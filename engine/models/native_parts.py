"""Parts of layers in native code, one call each, for decoders whose layers the kernels don't compute whole: MLPs, and
the products of latent attention with the absorbed weights. (Torch's batched products have other last bits for other
numbers of rows.)"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.decoder import DecoderSpec, Layer
from engine.models.experts import Experts, Mlp
from engine.models.latent import BatchedProduct, HeadProduct, LatentAttention
from engine.models.layer_ops import Activation
from engine.models.layer_ops.torch_ops import gated, inner_values
from engine.models.native_experts import NativeExperts
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.structs import KIND_OF, LinearStruct
from engine.native.workspace import KernelWorkspace


class NativeMlp:
    """An MLP of `NativeLinear`s. Gate and up are interleaved by vectors (`NativeBuilder.gated`)."""

    __slots__ = ("_activation", "_has_gates", "_lanes", "_mlp")

    def __init__(self, library: NativeLibrary, mlp: Mlp, spec: DecoderSpec) -> None:
        self._mlp = mlp
        self._lanes = library.panel // 2
        self._activation: Activation = spec.activation
        self._has_gates = spec.has_gates

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        if not self._has_gates:
            return self._mlp.down(inner_values(self._activation, self._mlp.gate_up(x)))
        gate, up = self._mlp.gate_up(x).view(len(x), -1, 2, self._lanes).unbind(2)
        return self._mlp.down(gated(self._activation, gate, up).flatten(1)[:, : self._mlp.down.in_features])


class ExpertRoom:
    """The buffers of all mixtures of a decoder, which are computed one after the other."""

    __slots__ = ("_reorders", "_space")

    def __init__(self) -> None:
        self._space: KernelWorkspace | None = None
        self._reorders = False

    def of(self, library: NativeLibrary, experts: NativeExperts, x: Tensor) -> KernelWorkspace:
        """With room for the rows of x [rows, hidden], and for their gathered columns if some mixture has an order."""
        grows = experts.reorders and not self._reorders
        self._reorders |= experts.reorders
        if self._space is None or self._space.max_tokens < len(x) or grows:
            self._space = experts.workspace(
                library, x.shape[1], KIND_OF[x.dtype], max(len(x), 16), reorders=self._reorders
            )
        return self._space


class NativeMixture:
    """A mixture of experts, its router and shared expert included."""

    __slots__ = ("_activation", "_experts", "_library", "_room")

    def __init__(
        self, library: NativeLibrary, experts: NativeExperts, activation: Activation, room: ExpertRoom
    ) -> None:
        self._library = library
        self._experts = experts
        self._activation = activation
        self._room = room

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; `routed` as of `WholeMixture`."""
        space = self._room.of(self._library, self._experts, x)
        return self._experts.product(x, self._activation, space, routed).to(x.dtype)


def with_native_mlps(library: NativeLibrary, spec: DecoderSpec, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The same layers, whose MLPs, made by a `NativeBuilder`, are computed in one call each."""
    room = ExpertRoom()

    def native(layer: Layer) -> Layer:
        mixture = layer.mixture
        if isinstance(mixture, Experts):
            assert spec.experts is not None
            experts = NativeExperts(library, spec.experts, mixture)
            whole = NativeMixture(library, experts, spec.activation, room)
            if layer.joined is None:
                return replace(layer, mlp=whole)
            layer = replace(layer, joined=replace(layer.joined, experts=whole))
        return replace(layer, mlp=NativeMlp(library, layer.mlp, spec)) if isinstance(layer.mlp, Mlp) else layer

    return tuple(map(native, layers))


class NativeHeadProduct:
    """A `HeadProduct` in native code.

    Attributes:
        linears: of each head.
    """

    __slots__ = ("_library", "_space", "_structs", "linears")

    def __init__(self, library: NativeLibrary, weight: Tensor) -> None:
        """From [heads, in_features, out_features]."""
        self._library = library
        self.linears = [NativeLinear.dense(library, KIND_OF[weight.dtype], of_head.t()) for of_head in weight]
        self._structs = (LinearStruct * len(weight))(*(linear.struct for linear in self.linears))
        self._space = KernelWorkspace.for_linear(library, weight.shape[1], 1)

    def __call__(self, x: Tensor) -> Tensor:
        """See `HeadProduct`."""
        per_word = 4 // x.itemsize
        if x.stride(2) != 1 or any(size % per_word for size in (x.storage_offset(), *x.stride()[:2], x.shape[2])):
            x = F.pad(x, (0, x.shape[2] % per_word)).contiguous()
        y = torch.empty(*x.shape[:2], self.linears[0].out_features, dtype=torch.float32)
        self._library.heads(KIND_OF[x.dtype], self._structs, x, y, self._space.struct)
        return y.to(x.dtype)


def with_native_heads(library: NativeLibrary, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The same layers, whose absorbed products are computed by the kernels."""

    def product(of: HeadProduct) -> NativeHeadProduct:
        assert isinstance(of, BatchedProduct)
        return NativeHeadProduct(library, of.weight)

    def native(layer: Layer) -> Layer:
        part = layer.attention
        if not isinstance(part, LatentAttention):
            return layer
        return replace(layer, attention=replace(part, keys=product(part.keys), values=product(part.values)))

    return tuple(map(native, layers))
