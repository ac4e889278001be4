"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionStep, KVLayout
from engine.attention.native import NativeAttention
from engine.attention.paged_sdpa import PagedSdpaAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import EngineError
from engine.native.library import NativeLibrary
from engine.native.structs import Kind

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionStep", "KVLayout", "backend_names", "make_backend"]

_TORCH_BACKENDS: dict[str, Callable[[KVLayout, torch.dtype, torch.device], AttentionBackend]] = {
    ReferenceAttention.name: ReferenceAttention,
    PagedSdpaAttention.name: PagedSdpaAttention,
}

TRITON = "triton"


def backend_names() -> tuple[str, ...]:
    """Names that `EngineConfig.attention` takes beside "auto"."""
    return (*_TORCH_BACKENDS, NativeAttention.name, TRITON)


def make_backend(
    name: str,
    layout: KVLayout,
    dtype: torch.dtype,
    device: torch.device,
    native: NativeLibrary | None = None,
    kv_kind: Kind | None = None,
) -> AttentionBackend:
    """The backend of that name ("auto": the fastest one for the device), with its cache allocated.

    Args:
        native: the kernels, where they serve.
        kv_kind: of the native backend's cache; None: the dtype's.

    Raises:
        EngineError: there is no such backend, or it lacks what it needs.
    """
    if name == "auto":
        name = _best(device, native)
    if name == NativeAttention.name:
        if native is None:
            raise EngineError("native attention needs the native kernels")
        return NativeAttention(layout, dtype, native, kv_kind)
    if name == TRITON:
        return _triton(layout, dtype, device)
    if name not in _TORCH_BACKENDS:
        raise EngineError(f"no attention backend {name!r}; choose auto or one of {', '.join(backend_names())}")
    return _TORCH_BACKENDS[name](layout, dtype, device)


def _best(device: torch.device, native: NativeLibrary | None) -> str:
    if native is not None:
        return NativeAttention.name
    return TRITON if device.type == "cuda" and find_spec("triton") is not None else PagedSdpaAttention.name


def _triton(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """On a GPU; on a CPU in Triton's interpreter, thousands of times slower, where its variable asks for that."""
    interpreted = device.type != "cuda" and os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None:
        raise EngineError("attention 'triton' needs the package triton, which comes with torch's CUDA builds")
    if device.type != "cuda" and not interpreted:
        raise EngineError(f"attention 'triton' runs on CUDA devices, not on {device.type}")
    from engine.attention.triton_paged import TritonPagedAttention  # noqa: PLC0415 - triton is not always there

    if interpreted:
        return TritonPagedAttention(layout, dtype, device, upcast=True, processors=1)
    return TritonPagedAttention(layout, dtype, device)
