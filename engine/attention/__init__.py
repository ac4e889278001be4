"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from collections.abc import Callable

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


def backend_names() -> tuple[str, ...]:
    """Names that `EngineConfig.attention` takes beside "auto"."""
    return (*_TORCH_BACKENDS, NativeAttention.name)


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
        name = PagedSdpaAttention.name if native is None else NativeAttention.name
    if name == NativeAttention.name:
        if native is None:
            raise EngineError("native attention needs the native kernels")
        return NativeAttention(layout, dtype, native, kv_kind)
    if name not in _TORCH_BACKENDS:
        raise EngineError(f"no attention backend {name!r}; choose auto or one of {', '.join(backend_names())}")
    return _TORCH_BACKENDS[name](layout, dtype, device)
