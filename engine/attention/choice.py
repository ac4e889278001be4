"""Selects the attention backend: by name, or the best one for the device, the model and the installed libraries.

On a CUDA device `choose_attention` measures what is installed, once for each layout. `make_backend` alone measures
nothing: "auto" is then a fixed order, of which ranks that share a model, and draft models, get the same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from engine.attention.base import AttentionBackend, KVLayout
from engine.attention.by_shape import attention_by_shape
from engine.attention.flash import LIBRARIES, FlashAttention, Found, flash_attention, version_of
from engine.attention.measured import Candidate, StoredAttention, fastest, measure_backends
from engine.attention.native import NativeAttention
from engine.attention.paged_sdpa import PagedSdpaAttention
from engine.attention.reference import ReferenceAttention
from engine.config import BLOCK_TOKENS
from engine.errors import EngineError
from engine.logs import get_logger
from engine.models.base import ModelSpec
from engine.native.choice import NO_FP8_HERE
from engine.native.library import NativeLibrary
from engine.native.structs import ElementKind
from engine.plan import CacheGroup

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
    found: Found | None = None,
) -> AttentionBackend:
    """Create the backend of that name ("auto": the first of a fixed order that fits), with its cache allocated.

    Args:
        native: the kernels, where they are used.
        kv_kind: of the native backend's cache; None: the dtype's.
        fp8: the cache is float8_e4m3fn, with a scale for each token and head; only "triton" supports it.
        found: the library's module; None: it is searched for, and for a library's name it may be downloaded.

    Raises:
        EngineError: there is no such backend, or a requirement of it is missing.
    """
    if layout.shapes:
        return attention_by_shape(
            layout, lambda part: make_backend(name, part, dtype, device, native, kv_kind, fp8=fp8, found=found)
        )
    if name == "auto":
        name, found = (NativeAttention.name, None) if native is not None else _preferred(layout, dtype, device, fp8)
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


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """An attention backend, chosen before its cache is planned.

    Attributes:
        name: for `make_backend`; "auto" where nothing was measured.
        block_size: tokens of a block of the KV cache.
        found: the library's module; None: it is none, or was not searched for.
    """

    name: str
    block_size: int
    found: Found | None = None


def default_block_size(name: str) -> int:
    """Return the tokens of a block of the KV cache that a backend takes where the settings give none."""
    return max(BLOCK_TOKENS, LIBRARIES[name].page) if name in LIBRARIES else BLOCK_TOKENS


def choose_attention(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
    *,
    fp8: bool = False,
    requires_graphs: bool = False,
    launch_seconds: float = 0.0,
) -> AttentionChoice:
    """Choose the attention backend of a model, and the block size of its cache: a named backend as it is; for "auto" on
    a CUDA device the fastest one of those that are installed (`engine.attention.measured`).

    Nothing is measured where no library beside Triton can be imported that takes the model, with a float8 cache, and
    for models whose layers differ in shape.

    Args:
        block_size: tokens; None: the backend's default.
        fp8: the cache is float8_e4m3fn.
        requires_graphs: only a backend whose steps can be captured may be chosen: no library's can.
        launch_seconds: time in which the host launches a layer that no graph launches; 0: there will be no graphs.
    """
    unmeasured = AttentionChoice(name, block_size or default_block_size(name))
    if name != "auto" or device.type != "cuda" or fp8 or requires_graphs or spec.kv_shapes:
        return unmeasured
    libraries = list(_candidates(spec, dtype, device, block_size))
    if not libraries:
        return unmeasured
    candidates = [_reference(spec, dtype, device, block_size), *(candidate for candidate, _ in libraries)]
    measured = measure_backends(candidates, spec, dtype, device)
    if measured is None:
        return unmeasured
    chosen = fastest(measured, len(spec.attending_layers), launch_seconds)
    modules = {candidate.name: found for candidate, found in libraries}
    (size,) = (candidate.block_size for candidate in candidates if candidate.name == chosen)
    return AttentionChoice(chosen, size, modules.get(chosen))


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


def _candidates(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int | None
) -> Iterator[tuple[Candidate, Found]]:
    """Yield the libraries that can be imported here and take this model and block size, with their modules."""
    groups = (CacheGroup(spec.attending_layers, None, 1),)
    # flash2 first: vLLM's FlashAttention 3, on import, puts an empty module in the place of the package flash_attn.
    for name in ("flash2", "flash3", "torch-varlen"):
        library, size = LIBRARIES[name], block_size or default_block_size(name)
        if library.refusal(KVLayout.of(spec, groups, size), dtype, device) is not None:
            continue
        if (found := library.find(False)) is not None:
            make = partial(FlashAttention, library, found, dtype=dtype, device=device)
            yield Candidate(name, size, version_of(found), make), found


def _reference(spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int | None) -> Candidate:
    """Return the backend that others are compared with."""
    size, name, version = block_size or BLOCK_TOKENS, PagedSdpaAttention.name, torch.__version__
    if find_spec("triton") is not None:
        import triton  # noqa: PLC0415 - it is not always there

        name, version = TRITON, triton.__version__

    def make(layout: KVLayout) -> StoredAttention:
        backend = make_backend(name, layout, dtype, device)
        assert isinstance(backend, StoredAttention)
        return backend

    return Candidate(name, size, version, make)


def _preferred(layout: KVLayout, dtype: torch.dtype, device: torch.device, fp8: bool) -> tuple[str, Found | None]:
    """Return the first backend that fits, without native kernels and without measuring, and its library's module, if
    it has one. Nothing is downloaded."""
    if device.type != "cuda":
        if fp8:
            raise EngineError(NO_FP8_HERE)
        return PagedSdpaAttention.name, None
    triton = find_spec("triton") is not None
    if fp8:
        if not triton:
            raise EngineError("kv_dtype 'fp8' needs the package triton, which comes with torch's CUDA builds")
        return TRITON, None
    if triton and _fits_triton(layout, device):
        return TRITON, None
    for name in ("flash3", "flash2", "torch-varlen"):
        library = LIBRARIES[name]
        if library.refusal(layout, dtype, device) is not None:
            continue
        if (found := library.find(False)) is not None:
            return name, found
    return PagedSdpaAttention.name, None


def _fits_triton(layout: KVLayout, device: torch.device) -> bool:
    """Whether the device has enough shared memory for Triton's kernels of this layout."""
    if not layout.latent_dim:
        return True
    from engine.attention.triton_tiling import refusal, shared_memory  # noqa: PLC0415 - triton is not always there

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
