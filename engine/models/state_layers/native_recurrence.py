"""Gated linear recurrences in native code; see engine/native/csrc/recurrence.h."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Layer
from engine.models.state_layers.delta import DeltaNet
from engine.models.state_layers.gates import GatedNorm
from engine.models.state_layers.mamba import Mamba
from engine.models.state_layers.recurrence import Recurrence
from engine.native.library import NativeLibrary
from engine.native.linear import NativeLinear
from engine.native.structs import KIND_OF, ElementKind, GatedNormStruct, RecurrenceStruct, StateScanStruct
from engine.quant.base import DenseLinear, Linear
from engine.states import Segments, StateOperator

STATE_TOKENS = 32
"""As in csrc/api.h."""

_LANES = 64
"""Columns of a matrix that the kernels hold at once, on any instruction set as many at most."""


class RecurrenceRoom:
    """The buffers of all recurrences of a decoder, which are computed one after the other."""

    __slots__ = ("_history", "_space")

    def __init__(self) -> None:
        self._history = torch.empty(0, dtype=torch.uint8)
        self._space = torch.empty(0, dtype=torch.uint8)

    def take(self, history_bytes: int, space_bytes: int) -> tuple[int, int]:
        """Return the addresses of two buffers of so many bytes at least, valid until the next call."""
        if len(self._history) < history_bytes:
            self._history = torch.empty(history_bytes, dtype=torch.uint8)
        if len(self._space) < space_bytes:
            self._space = torch.empty(space_bytes, dtype=torch.uint8)
        return self._history.data_ptr(), self._space.data_ptr()


class NativeRecurrence:
    """The `StateOperator` of a layer in native code, with the weights of torch's."""

    __slots__ = ("_library", "_room", "_struct", "_thread_bytes", "_weights")

    def __init__(self, library: NativeLibrary, weights: Recurrence, room: RecurrenceRoom) -> None:
        shape = weights.shape
        self._library = library
        self._weights = weights
        self._room = room
        self._struct = RecurrenceStruct(
            shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim, shape.kernel_size,
            sum(shape.sizes), *shape.starts, shape.delta_rule, shape.delta_rule,
            weights.gates.has_rates, *weights.gates.steps, weights.gates.decay_scale.data_ptr(),
            weights.conv.data_ptr(), _at(weights.bias), _at(weights.skip),
        )  # fmt: skip
        key, value = (-(-size // _LANES) * _LANES for size in (shape.key_dim, shape.value_dim))
        self._thread_bytes = 4 * (STATE_TOKENS * (2 * key + value) + value * shape.key_dim)

    def __call__(self, states: tuple[Tensor, ...], segments: Segments, *inputs: Tensor) -> Tensor:
        """See `StateOperator`; returns float32 [T, value_heads, value_dim]."""
        remembered, matrices = states
        features, gates = (part.contiguous() for part in inputs)
        shape = self._weights.shape
        out = torch.empty(len(features), shape.num_value_heads, shape.value_dim)
        history_bytes = len(segments.first) * remembered[0].nbytes
        history, space = self._room.take(history_bytes, self._library.threads * self._thread_bytes)
        parts = [np.ascontiguousarray(ids) for ids in (segments.first, segments.count, segments.read, segments.write)]
        scan = StateScanStruct(
            len(segments.first), *(part.ctypes.data for part in parts), features.data_ptr(), gates.data_ptr(),
            remembered.data_ptr(), matrices.data_ptr(), history, out.data_ptr(), space, self._thread_bytes,
        )  # fmt: skip
        self._library.scan(KIND_OF[features.dtype], self._struct, scan)
        return out


class NativeGatedNorm:
    """A `GatedNorm` in native code."""

    __slots__ = ("_library", "_norm", "_struct")

    def __init__(self, library: NativeLibrary, norm: GatedNorm) -> None:
        self._library = library
        self._norm = norm
        weight = norm.weight
        self._struct = GatedNormStruct(len(weight), norm.group, norm.gates_first, 0.0, weight.data_ptr())

    def __call__(self, x: Tensor, z: Tensor, epsilon: float) -> Tensor:
        """See `OutputNorm`."""
        self._struct.eps = epsilon
        y = torch.empty(x.shape, dtype=z.dtype)
        self._library.gated_norm(self._struct, x.contiguous(), z if z.stride(1) == 1 else z.contiguous(), y)
        return y


def with_native_recurrences(library: NativeLibrary, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The same layers, with recurrences of the kernels, and what surrounds them. (Torch's products and functions have
    other last bits for other numbers of rows.)"""
    room = RecurrenceRoom()

    def recurrence(weights: StateOperator) -> NativeRecurrence:
        assert isinstance(weights, Recurrence)
        return NativeRecurrence(library, weights, room)

    def exact(linear: Linear) -> NativeLinear:
        assert isinstance(linear, DenseLinear)
        return NativeLinear.dense(library, ElementKind.F32, linear.weight, linear.bias)

    def native(layer: Layer) -> Layer:
        part = layer.attention
        if not isinstance(part, DeltaNet | Mamba):
            return layer
        assert isinstance(part.norm, GatedNorm)
        norm = NativeGatedNorm(library, part.norm)
        gates, states = exact(part.gates), recurrence(part.recurrence)
        return replace(layer, attention=replace(part, gates=gates, recurrence=states, norm=norm))

    return tuple(map(native, layers))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
