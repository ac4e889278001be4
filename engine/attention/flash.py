"""Paged attention by third-party libraries: FlashAttention 3, FlashAttention 2, and torch's own build of it.

All take a flat batch of queries and pages of keys and differ in names and requirements, which the adapters cover.
Queries are aligned to the end of their sequences (causal from the lower right), so that chunks and decoding tokens are
one call. No adapter has run on a GPU yet: they are tested with functions of the same signatures, as the libraries'
sources have them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBatch, KVLayout
from engine.attention.storage import KVStorage
from engine.errors import EngineError
from engine.logs import get_logger
from engine.models.base import LayerCache
from engine.plan import BlockCopy

logger = get_logger(__name__)

Found = tuple[ModuleType, str]
"""A library's module, and its origin."""

_HUB_KERNEL = "kernels-community/flash-attn3"


@dataclass(frozen=True, slots=True)
class Pages:
    """A cache group's share of a step of B sequences and T tokens.

    Attributes:
        firsts: int32 [B + 1], the row of each sequence's first query; T at the end.
        first_keys: int32 [B + 1], likewise over keys, as if they were contiguous.
        lengths: int32 [B], keys of each sequence.
        table: int32 [B, blocks].  slots: int64 [T].
        max_queries, max_keys: maximum of one sequence.
    """

    firsts: Tensor
    first_keys: Tensor
    lengths: Tensor
    table: Tensor
    slots: Tensor
    max_queries: int
    max_keys: int


Call = Callable[[ModuleType, Tensor, Tensor, Tensor, Pages, float, tuple[int, int]], Tensor]
"""(module, q [T, heads, dim], keys and values [blocks, block_size, kv_heads, dim], pages, scale, window) -> as q.

window: keys before a query's own, and after it, that it sees; -1: all before."""


def _kv_cache(
    module: ModuleType, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: tuple[int, int]
) -> Tensor:
    """FlashAttention 3's own interface."""
    out: Tensor = module.flash_attn_with_kvcache(
        q, keys, values, cache_seqlens=pages.lengths, page_table=pages.table, cu_seqlens_q=pages.firsts,
        max_seqlen_q=pages.max_queries, softmax_scale=scale, causal=True, window_size=window,
    )  # fmt: skip
    return out


def _vllm(
    module: ModuleType, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: tuple[int, int]
) -> Tensor:
    """FlashAttention 3 as vLLM carries it."""
    out: Tensor = module.flash_attn_varlen_func(
        q, keys, values, max_seqlen_q=pages.max_queries, cu_seqlens_q=pages.firsts, max_seqlen_k=pages.max_keys,
        seqused_k=pages.lengths, softmax_scale=scale, causal=True, window_size=list(window), block_table=pages.table,
        fa_version=3,
    )  # fmt: skip
    return out


def _flash3(
    module: ModuleType, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: tuple[int, int]
) -> Tensor:
    own = hasattr(module, "flash_attn_with_kvcache") and not hasattr(module, "fa_version_unsupported_reason")
    return (_kv_cache if own else _vllm)(module, q, keys, values, pages, scale, window)


def _flash2(
    module: ModuleType, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: tuple[int, int]
) -> Tensor:
    """It derives the lengths of paged keys from the offsets that contiguous keys would have."""
    out: Tensor = module.flash_attn_varlen_func(
        q, keys, values, pages.firsts, pages.first_keys, pages.max_queries, pages.max_keys,
        softmax_scale=scale, causal=True, window_size=window, block_table=pages.table,
    )  # fmt: skip
    return out


def _torch_varlen(
    module: ModuleType, q: Tensor, keys: Tensor, values: Tensor, pages: Pages, scale: float, window: tuple[int, int]
) -> Tensor:
    """Causal means a window without an end before, and with one at the query itself."""
    out: Tensor = module.varlen_attn(
        q, keys, values, pages.firsts, pages.first_keys, pages.max_queries, pages.max_keys,
        scale=scale, window_size=window, enable_gqa=True, seqused_k=pages.lengths, block_table=pages.table,
    )  # fmt: skip
    return out


def _imported(name: str) -> Found | None:
    """Return the module, if it is installed and can be imported on this machine."""
    try:
        if find_spec(name) is None:
            return None
        return import_module(name), name
    except (ImportError, OSError, RuntimeError):  # a parent is missing, or its libraries are for another torch
        return None
    except ValueError:  # an empty module stands there, as vLLM's of flash_attn
        return None


def find_flash3(download: bool) -> Found | None:
    """FlashAttention 3: its own package, the hub's, or the one in vLLM."""
    if (found := _imported("flash_attn_interface")) is not None:
        return found
    if download and (found := _from_hub()) is not None:
        return found
    found = _imported("vllm.vllm_flash_attn")
    return found if found is not None and found[0].is_fa_version_supported(3) else None


def _from_hub() -> Found | None:
    kernels = _imported("kernels")
    if kernels is None:
        return None
    try:
        return kernels[0].get_kernel(_HUB_KERNEL), f"kernels: {_HUB_KERNEL}"
    except Exception as error:  # noqa: BLE001 - after any error of a download the next package is tried
        reason = f"{type(error).__name__}: {error}"
        logger.warning("the hub gave no FlashAttention 3", kernel=_HUB_KERNEL, reason=reason)
        return None


def find_flash2(download: bool) -> Found | None:
    """FlashAttention 2, as it is installed."""
    found = _imported("flash_attn")
    return found if found is not None and hasattr(found[0], "flash_attn_varlen_func") else None


def find_torch_varlen(download: bool) -> Found | None:
    """torch's own, from the version that supports pages (2.12)."""
    found = _imported("torch.nn.attention.varlen")
    return found if found is not None and "block_table" in signature(found[0].varlen_attn).parameters else None


def version_of(found: Found) -> str:
    """Return a text that changes with a library's build."""
    module, origin = found
    root = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(module, "__file__", None)
    return f"{origin} {getattr(root, '__version__', '')} {0 if file is None else os.stat(file).st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class Library:
    """A library and its requirements.

    Attributes:
        package: that contains it.
        find: returns the module, or None; the argument allows a download of code that then runs here.
        page: tokens that a block must hold, or a multiple of them.
        least, most: compute capability, as (major, minor); `most` is exclusive.
        largest_head: maximum head dimension.
    """

    name: str
    package: str
    find: Callable[[bool], Found | None]
    call: Call
    page: int
    least: tuple[int, int]
    most: tuple[int, int]
    largest_head: int = 256

    def refusal(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return why it can't be used, or None."""
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if layout.latent_dim:
            return "does not compute latent attention, which this model has; use triton or paged-sdpa"
        if layout.has_sinks:
            return "does not compute attention sinks, which this model has; use triton or paged-sdpa"
        if layout.block_size % self.page:
            return f"takes blocks of {self.page} tokens or a multiple, not of {layout.block_size}: set kv_block_size"
        if layout.head_dim > self.largest_head or layout.head_dim % 8:
            return f"takes heads of a multiple of 8 up to {self.largest_head}, not of {layout.head_dim}"
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        capability = torch.cuda.get_device_capability(device)
        if not self.least <= capability < self.most:
            return f"is not for devices of compute capability {capability[0]}.{capability[1]}"
        return None


LIBRARIES: Mapping[str, Library] = {
    library.name: library
    for library in (
        Library("flash3", "flash_attn_interface, kernels or vllm", find_flash3, _flash3, 16, (9, 0), (10, 0)),
        Library("flash2", "flash-attn", find_flash2, _flash2, 256, (8, 0), (13, 0)),
        Library("torch-varlen", "torch 2.12 or later", find_torch_varlen, _torch_varlen, 256, (8, 0), (13, 0)),
    )
}
"""By the name that `EngineConfig.attention` takes."""


def flash_attention(
    library: Library, layout: KVLayout, dtype: torch.dtype, device: torch.device, found: Found | None = None
) -> FlashAttention:
    """Create attention by this library; unless `found` is given, its module is searched for and may be downloaded.

    Raises:
        EngineError: the library is missing, or does not support this model or device; names what to change.
    """
    if (reason := library.refusal(layout, dtype, device)) is not None:
        raise EngineError(f"attention {library.name!r} {reason}")
    found = found or library.find(True)
    if found is None:
        raise EngineError(f"attention {library.name!r} needs {library.package}, which can't be imported here")
    return FlashAttention(library, found, layout, dtype, device)


class FlashAttention:
    """Attention by one of the libraries, over the same blocks as the other backends.

    Attributes:
        name: the library's.  origin: of its module.
    """

    def __init__(
        self, library: Library, found: Found, layout: KVLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`found`: the library's module, which supports this layout, dtype and device."""
        self.name = library.name
        self.storage = KVStorage(layout, dtype, device)
        self._module, self.origin = found
        self._call = library.call
        self._device = device

    def prepare(self, batch: AttentionBatch) -> tuple[Pages, ...]:
        lengths = batch.starts + batch.counts
        shared = [_from_zero(batch.counts), _from_zero(lengths), lengths.astype(np.int32)]
        firsts, first_keys, there = (self._carry(part) for part in shared)
        max_queries, max_keys = int(batch.counts.max()), int(lengths.max())
        return tuple(
            Pages(firsts, first_keys, there, self._carry(table), self._carry(slots), max_queries, max_keys)
            for table, slots in zip(batch.block_tables, batch.slot_mapping, strict=True)
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, step: tuple[Pages, ...],
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert sinks is None, "refused with the layout"
        storage, layout = self.storage, self.storage.layout
        pages, window = step[storage.group_of[layer]], storage.window_of[layer]
        storage.write(layer, k, v, pages.slots)
        shape = (-1, layout.block_size, layout.num_kv_heads, layout.head_dim)
        keys, values = storage.keys[layer].view(shape), storage.values[layer].view(shape)
        before = -1 if window is None else window - 1
        return self._call(self._module, q.contiguous(), keys, values, pages, scale, (before, 0))

    def block_tensors(self, group: int) -> list[Tensor]:
        return self.storage.block_tensors(group)

    def layer_cache(self, layer: int, step: tuple[Pages, ...]) -> LayerCache:
        """See `AttentionBackend.layer_cache`."""
        return self.storage.layer_cache(layer, step[self.storage.group_of[layer]].slots)

    def zero(self, group: int, blocks: list[int]) -> None:
        self.storage.zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        self.storage.copy(group, copies)

    def _carry(self, part: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        there = torch.from_numpy(np.ascontiguousarray(part))
        return there.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else there


def _from_zero(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
