"""Selects the attention backend: by name, or the best one for the device, the model and the installed libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend, KVLayout
from engine.attention.by_shape import attention_by_shape
from engine.attention.flash import LIBRARIES, FlashAttention, Found, flash_attention
from engine.attention.native import NativeAttention
from engine.attention.paged_sdpa import PagedSdpaAttention
from engine.attention.reference import ReferenceAttention
from engine.errors import EngineError
from engine.logs import get_logger
from engine.native.choice import NO_FP8_HERE
from engine.native.library import NativeLibrary
from engine.native.structs import ElementKind

logger = get_logger(__name__)

FP8 = torch.float8_e4m3fn

FP8_SINCE = (8, 9)
"""Compute capability from which a device converts to float8_e4m3fn (Ada)."""

TRITON = "triton"

_TORCH_BACKENDS: dict[str, Callable[[KVLayout, torch.dtype, torch.device], AttentionBackend]] = {
    ReferenceAttention.name: ReferenceAttention,
    PagedSdpaAttention.name: PagedSdpaAttention,
}

_CAVEATS = {
    PagedSdpaAttention.name: "slow on a GPU: install triton, or FlashAttention",
    ReferenceAttention.name: "slow on purpose",
    **dict.fromkeys(LIBRARIES, "not tried on a GPU by us yet, only with stand-ins of the same signature"),
}
"""Disadvantage of a backend on a GPU, by its name; "triton" has none."""


def backend_names() -> tuple[str, ...]:
    """Return the names that `EngineConfig.attention` accepts in addition to "auto"."""
    return (*_TORCH_BACKENDS, NativeAttention.name, TRITON, *LIBRARIES)


def make_backend(
    name: str,
    layout: KVLayout,
    dtype: torch.dtype,
    device: torch.device,
    native: NativeLibrary | None = None,
    kv_kind: ElementKind | None = None,
    *,
    fp8: bool = False,
) -> AttentionBackend:
    """Create the backend of that name ("auto": the fastest one for the device), with its cache allocated.

    Args:
        native: the kernels, where they are used.
        kv_kind: of the native backend's cache; None: the dtype's.
        fp8: the cache is float8_e4m3fn, with a scale for each token and head; only "triton" supports it.

    Raises:
        EngineError: there is no such backend, or a requirement of it is missing.
    """
    if layout.shapes:
        return attention_by_shape(
            layout, lambda part: make_backend(name, part, dtype, device, native, kv_kind, fp8=fp8)
        )
    found = None
    if name == "auto":
        name, found = (NativeAttention.name, None) if native is not None else _best(layout, dtype, device, fp8)
    if fp8 and name != TRITON:
        raise EngineError(f"kv_dtype 'fp8' is of attention 'triton', but attention is {name!r}")
    if name == NativeAttention.name:
        if native is None:
            raise EngineError("native attention needs the native kernels")
        return NativeAttention(layout, dtype, native, kv_kind)
    if name == TRITON:
        return _triton(layout, FP8 if fp8 else dtype, device)
    if name in LIBRARIES:
        return flash_attention(LIBRARIES[name], layout, dtype, device, found)
    if name not in _TORCH_BACKENDS:
        raise EngineError(f"no attention backend {name!r}; choose auto or one of {', '.join(backend_names())}")
    return _TORCH_BACKENDS[name](layout, dtype, device)


def log_choice(backend: AttentionBackend, device: torch.device) -> None:
    """Log the attention backend of a GPU with its known disadvantage; the setting `attention` selects another."""
    if device.type == "cuda":
        origin = {"origin": backend.origin} if isinstance(backend, FlashAttention) else {}
        caveat = _CAVEATS.get(backend.name)
        if caveat is None:
            logger.info("attention was chosen", backend=backend.name, **origin)
        else:
            logger.warning("attention was chosen", backend=backend.name, note=caveat, **origin)


def supports_fp8_cache(device: torch.device) -> bool:
    """Whether this device supports a float8 cache."""
    if device.type != "cuda":
        return _interpreted(device)
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= FP8_SINCE


def _best(layout: KVLayout, dtype: torch.dtype, device: torch.device, fp8: bool) -> tuple[str, Found | None]:
    """Return the best backend without native kernels, and its library's module, if it has one.

    Nothing is downloaded unless configured.
    """
    if device.type != "cuda":
        if fp8:
            raise EngineError(NO_FP8_HERE)
        return PagedSdpaAttention.name, None
    triton = find_spec("triton") is not None
    if fp8:
        if not triton:
            raise EngineError("kv_dtype 'fp8' needs the package triton, which comes with torch's CUDA builds")
        return TRITON, None
    for name in ("flash3", TRITON, "flash2", "torch-varlen"):
        if name == TRITON and triton and _fits_triton(layout, device):
            return name, None
        library = LIBRARIES.get(name)
        if library is None or library.refusal(layout, dtype, device) is not None:
            continue
        if (found := library.find(False)) is not None:
            return name, found
    return PagedSdpaAttention.name, None


def _fits_triton(layout: KVLayout, device: torch.device) -> bool:
    """Whether the device has enough shared memory for Triton's kernels of this layout."""
    if not layout.latent_dim:
        return True
    from engine.attention.triton_paged import refusal, shared_memory  # noqa: PLC0415 - triton is not always there

    return refusal(layout, shared_memory(device)) is None


def _interpreted(device: torch.device) -> bool:
    """Whether Triton's interpreter on a CPU is requested by its environment variable; it is thousands of times
    slower."""
    return device.type != "cuda" and os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def _triton(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    if find_spec("triton") is None:
        raise EngineError("attention 'triton' needs the package triton, which comes with torch's CUDA builds")
    interpreted = _interpreted(device)
    if device.type != "cuda" and not interpreted:
        raise EngineError(f"attention 'triton' runs on CUDA devices, not on {device.type}")
    if dtype == FP8 and not supports_fp8_cache(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise EngineError(f"kv_dtype 'fp8' needs compute capability 8.9 or later; this device has {major}.{minor}")
    from engine.attention.triton_paged import TritonPagedAttention  # noqa: PLC0415 - triton is not always there

    if interpreted:
        return TritonPagedAttention(layout, dtype, device, upcast=True, processors=1)
    return TritonPagedAttention(layout, dtype, device)
