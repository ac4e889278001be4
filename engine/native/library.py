"""Loads the built kernels and calls them for one instruction set and number of threads."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.native import structs
from engine.native.build import INSTRUCTION_SETS, NativeUnavailable, build, processor_sets
from engine.native.structs import ElementKind
from engine.native.weight_memory import WeightMemory

CHOICES = ("auto", *INSTRUCTION_SETS)
"""Values of `EngineConfig.instruction_set`."""

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tm_supported": (c_int, []),
    "tm_panel": (c_int, []),
    "tm_abi": (c_int64, []),
    "tm_pack": (None, [c_int, c_int, c_int, *[c_void_p] * 4, c_int64]),
    "tm_pack_codes": (None, [c_int, c_int, c_int, c_void_p, c_int64, *[c_void_p] * 3]),
    "tm_pack_low_rank": (c_int, [c_int, c_int, c_int, *[c_void_p] * 4]),
    "tm_plan": (c_void_p, [c_void_p, c_int, c_int, c_int, c_int, c_void_p]),
    "tm_plan_groups": (c_void_p, [c_void_p]),
    "tm_plan_shared_rows": (c_int, [c_void_p, c_int]),
    "tm_plan_free": (None, [c_void_p]),
    "tm_forward": (None, [c_int, *[c_void_p] * 6]),
    "tm_linear": (None, [c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "tm_experts": (None, [*[c_int] * 4, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "tm_argmax": (None, [c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    "tm_attend": (None, [c_int, c_void_p, c_int, c_int, c_float, c_void_p, c_void_p, c_int, *[c_void_p] * 5]),
    "tm_scan": (None, [c_int, c_int, c_void_p, c_void_p]),
    "tm_heads": (None, [c_int, c_int, c_int, c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_void_p]),
    "tm_gated_norm": (None, [c_int, c_int, *[c_void_p] * 3, c_int64, c_int64, c_void_p]),
}  # fmt: skip


class NativeLibrary:
    """The kernels of one instruction set.

    Attributes:
        path: of the library.
        name: of the instruction set in use.
        panel: columns of a packed panel; weights are packed for it.
        threads: that a call runs on.
        weight_memory: of weights that are packed for it.
    """

    def __init__(self, path: Path, name: str, threads: int) -> None:
        self.path = path
        self.name = name
        self.threads = threads
        self.weight_memory = WeightMemory()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the built kernels don't load: {error}") from error
        try:
            for function, (result, arguments) in _SIGNATURES.items():
                bound = getattr(self._library, function)
                bound.restype, bound.argtypes = result, arguments
        except AttributeError as error:
            raise NativeUnavailable(f"{path}: was built from other sources; remove it") from error
        if self._library.tm_abi() != structs.ABI:
            raise NativeUnavailable(f"{path}: was built from other sources; remove it")
        if not self._library.tm_supported():
            raise NativeUnavailable(f"this processor has no {name}")
        self.panel: int = self._library.tm_panel()

    def pack(
        self, kind: ElementKind, rows: Tensor, packed: Tensor, scale: Tensor | None, offset: Tensor | None
    ) -> None:
        """Pack contiguous float32 rows [n, k] into `packed` words; `scale` float32 [padded n], `offset` int32 [groups,
        padded n], a view of as many columns as there are rows at least."""
        n, k = rows.shape
        stride = 0 if offset is None else offset.stride(0)
        self._library.tm_pack(kind, n, k, rows.data_ptr(), packed.data_ptr(), _at(scale), _at(offset), stride)

    def pack_codes(
        self, kind: ElementKind, k: int, codes: Tensor, rows: Tensor, packed: Tensor, offset: Tensor | None
    ) -> None:
        """Pack codes [n, bytes] (k of them a row) into zeroed panels: column c is row rows[c] (int32, -1: zeros)."""
        self._library.tm_pack_codes(
            kind, rows.numel(), k, codes.data_ptr(), codes.stride(0), rows.data_ptr(), packed.data_ptr(), _at(offset),
        )  # fmt: skip

    def pack_low_rank(self, kind: ElementKind, b: Tensor, rows: Tensor, ranks: Tensor, packed: Tensor) -> int:
        """Pack B float32 [n, rank] of an adapter: column c is row rows[c] (int32, -1: zeros). `ranks` int32 [panels,
        4], see PanelRanks in csrc/api.h; `packed` of the activations' dtype [panels * rank, panel], of which the first
        columns are taken, as many as are returned."""
        arguments = rows.numel(), b.shape[1], b.data_ptr(), rows.data_ptr(), ranks.data_ptr(), packed.data_ptr()
        return int(self._library.tm_pack_low_rank(kind, *arguments))

    def plan(
        self, cache: structs.CacheShape, heads: int, max_partials: int, groups: ctypes.Array[structs.GroupInput]
    ) -> StepTasks:
        """Divide a step's attention into tasks."""
        handle = self._library.tm_plan(
            ctypes.byref(cache), heads, self.threads, max_partials, len(groups), ctypes.byref(groups)
        )
        return StepTasks(self._library, handle)

    def forward(self, shape: Any, layers: Any, embedding: Tensor | None, norm: Tensor, step: Any, space: Any) -> None:
        """Run a decoder's step; see csrc/decoder.h. `embedding` None: it is the shape's table."""
        self._library.tm_forward(
            self.threads, ctypes.byref(shape), ctypes.byref(layers), _at(embedding),
            norm.data_ptr(), ctypes.byref(step), ctypes.byref(space),
        )  # fmt: skip

    def linear(self, activations: ElementKind, weight: Any, x: Tensor, y: Tensor, space: Any) -> None:
        """y float32 [rows, n] = x [rows, k] W^T + b."""
        self._library.tm_linear(
            self.threads, activations, ctypes.byref(weight), x.data_ptr(), x.shape[0],
            y.data_ptr(), ctypes.byref(space),
        )  # fmt: skip

    def experts(
        self, activations: ElementKind, experts: Any, x: Tensor, y: Tensor, space: Any, gate: structs.Gate
    ) -> None:
        """y float32 [rows, hidden]: the weighted sum of each row's experts; see csrc/experts.h."""
        self._library.tm_experts(
            self.threads, activations, x.shape[1], gate, ctypes.byref(experts),
            x.data_ptr(), x.shape[0], y.data_ptr(), ctypes.byref(space),
        )  # fmt: skip

    def argmax(
        self, activations: ElementKind, weight: Any, x: Tensor, best: Tensor, finite: Tensor, space: Any
    ) -> None:
        """Column of the largest product of each row (int64 [rows]), and whether its products are sound (bool)."""
        self._library.tm_argmax(
            self.threads, activations, ctypes.byref(weight), x.data_ptr(), x.shape[0],
            best.data_ptr(), finite.data_ptr(), ctypes.byref(space),
        )  # fmt: skip

    def attend(
        self, cache: Any, activations: ElementKind, heads: int, scale: float, layer: Any, group: int,
        q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, space: Any,
    ) -> None:  # fmt: skip
        """Store k and v, if there are any, then attend; all contiguous. `group`: address of the step's
        AttentionGroup."""
        self._library.tm_attend(
            self.threads, ctypes.byref(cache), activations, heads, scale, ctypes.byref(layer),
            group, q.shape[0], q.data_ptr(), _at(k), _at(v), out.data_ptr(), ctypes.byref(space),
        )  # fmt: skip

    def scan(self, activations: ElementKind, recurrence: Any, scan: Any) -> None:
        """Compute a layer with states; see csrc/recurrence.h."""
        self._library.tm_scan(self.threads, activations, ctypes.byref(recurrence), ctypes.byref(scan))

    def heads(self, activations: ElementKind, weights: Any, x: Tensor, y: Tensor, space: Any) -> None:
        """y float32 [rows, heads, n] of x [rows, heads, k], whose rows and heads may lie apart, in whole words.
        `weights`: a struct for each head."""
        per_word = 4 // x.itemsize
        self._library.tm_heads(
            self.threads, activations, len(weights), ctypes.addressof(weights), x.data_ptr(),
            x.stride(0) // per_word, x.stride(1) // per_word, len(x), y.data_ptr(), ctypes.byref(space),
        )  # fmt: skip

    def gated_norm(self, norm: Any, x: Tensor, z: Tensor, y: Tensor) -> None:
        """y [rows, features] of x float32 [rows, features], which is overwritten, and gates z, whose rows may lie
        apart; see csrc/recurrence.h."""
        self._library.tm_gated_norm(
            self.threads, structs.KIND_OF[z.dtype], ctypes.byref(norm), x.data_ptr(), z.data_ptr(),
            z.stride(0), len(x), y.data_ptr(),
        )  # fmt: skip


class StepTasks:
    """A step's attention tasks, freed with this object.

    Attributes:
        groups: address of an array of AttentionGroup, one per cache group.
    """

    __slots__ = ("_handle", "_library", "groups")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle = handle
        self.groups: int = library.tm_plan_groups(handle)

    def group(self, index: int) -> int:
        """Address of one cache group's tasks."""
        return self.groups + index * ctypes.sizeof(structs.AttentionGroup)

    def shared_rows(self, index: int) -> int:
        """Decoding sequences of a cache group whose common prefix is read once for several of them."""
        return int(self._library.tm_plan_shared_rows(self._handle, index))

    def __del__(self) -> None:
        self._library.tm_plan_free(self._handle)


def load_library(instruction_set: str = "auto", threads: int | None = None) -> NativeLibrary:
    """Return the kernels for this machine, built if necessary.

    Args:
        instruction_set: one of `CHOICES`; "auto": the best that the processor supports.

    Raises:
        NativeUnavailable: they can't be built or loaded, or the processor lacks the instruction set.
    """
    if instruction_set not in CHOICES:
        raise NativeUnavailable(f"no instruction set {instruction_set!r}; choose one of {', '.join(CHOICES)}")
    threads = threads or torch.get_num_threads()
    if instruction_set != "auto":
        return NativeLibrary(build(instruction_set), instruction_set, threads)
    reasons = []
    for name in reversed(processor_sets() or ["avx2"]):
        try:
            return NativeLibrary(build(name), name, threads)
        except NativeUnavailable as error:
            reasons.append(error)
    raise reasons[0]


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
