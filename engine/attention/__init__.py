"""Attention backends: one interface, chosen by name when the engine is loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import AttentionBackend, AttentionBatch, KVLayout
from engine.attention.paged_sdpa import PagedSdpaAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import EngineError

__all__ = ["AttentionBackend", "AttentionBatch", "KVLayout", "backend_names", "make_backend"]

_BACKENDS: dict[str, Callable[[KVLayout, torch.dtype, torch.device], AttentionBackend]] = {
    ReferenceAttention.name: ReferenceAttention,
    PagedSdpaAttention.name: PagedSdpaAttention,
}


def backend_names() -> tuple[str, ...]:
    """Names that `EngineConfig.attention` takes beside "auto"."""
    return tuple(_BACKENDS)


def make_backend(name: str, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend of that name ("auto": the fastest one for the device), with its cache allocated.

    Raises:
        EngineError: there is no such backend.
    """
    if name == "auto":
        name = PagedSdpaAttention.name
    if name not in _BACKENDS:
        raise EngineError(f"no attention backend {name!r}; choose auto or one of {', '.join(_BACKENDS)}")
    return _BACKENDS[name](layout, dtype, device)
