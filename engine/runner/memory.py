"""Sizes the paged KV cache by available memory and planned work.

Layers are grouped by sliding window, each group with its own pool, because blocks behind a window are released soon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import CacheConfig, KVDType, ScheduleConfig
from engine.errors import EngineError, OutOfMemory
from engine.models.base import ModelSpec
from engine.plan import STATE_WINDOW, CacheGroup

TYPICAL_TOKENS = 2048
"""Assumed length of a sequence when the work is unknown: only the proportion between the pools depends on it."""

PREFIX_ROOM = 0.25
"""Blocks beyond the running batch's, as a share of it: room for cached prefixes that no sequence uses."""


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated: the system's estimate, or the control group's limit if that is
    lower."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = _meminfo("MemAvailable")
    if available is None:
        raise EngineError("the free memory of this system is unknown; set the cache's memory_bytes")
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used))


def _meminfo(key: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _control_group(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def layer_token_bytes(spec: ModelSpec, layer: int, kv_dtype: KVDType = "auto", *, native: bool = False) -> int:
    """Return the bytes of one token's keys and values in a layer; in int8 and fp8 each head's K and V have a float32
    scale. `native`: in the native kernels' cache, which has keys and values in different orders, and so stores values
    that are a part of the keys (`ModelSpec.latent_dim`) once more."""
    small = kv_dtype in ("int8", "fp8")
    num_heads, dim = spec.kv_shape(layer)
    dims = (dim,) if spec.latent_dim and not native else (dim, spec.latent_dim or dim)
    heads = (dim + torch.float32.itemsize if small else dim * spec.dtype.itemsize for dim in dims)
    return num_heads * sum(heads)


def block_bytes(
    spec: ModelSpec, group: CacheGroup, block_size: int, kv_dtype: KVDType = "auto", *, native: bool = False
) -> int:
    """Return the bytes of one block of the group in all of its layers. `native`: as of `layer_token_bytes`."""
    if group.snapshot_blocks is not None:
        return sum(shape.nbytes for layer in group.layers for shape in spec.states[layer])
    tokens = (layer_token_bytes(spec, layer, kv_dtype, native=native) for layer in group.layers)
    return sum(tokens) * block_size


def sequence_bytes(spec: ModelSpec, tokens: int, kv_dtype: KVDType = "auto") -> int:
    """Return the bytes of a sequence of so many tokens in the cache of a device; of states, those of three blocks."""
    keys = sum(
        min(tokens, window or tokens) * layer_token_bytes(spec, layer, kv_dtype)
        for window, layers in spec.window_layers.items()
        for layer in layers
    )
    return keys + 3 * sum(shape.nbytes for layer in spec.state_layers for shape in spec.states[layer])


@dataclass(frozen=True, slots=True)
class _GroupNeed:
    """One group without its number of blocks, bytes of a block, and blocks of a typical and of the longest sequence."""

    group: CacheGroup
    block_bytes: int
    typical: int
    longest: int


def plan_cache(
    spec: ModelSpec,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    max_model_len: int,
    device: torch.device,
    kv_dtype: KVDType = "auto",
    draft: ModelSpec | None = None,
    *,
    native: bool = False,
) -> tuple[CacheGroup, ...]:
    """Divide the memory into pools, one for each sliding window of the model's layers. `draft`: of a draft model that
    stores its keys in the blocks of the full-attention group, too. `native`: as of `layer_token_bytes`.

    Raises:
        OutOfMemory: not even one sequence of `max_model_len` tokens fits.
    """
    typical = min(max_model_len, cache.tokens_per_sequence or TYPICAL_TOKENS)
    chunk = min(schedule.max_chunk_tokens or schedule.tokens, schedule.tokens)
    needs = []
    for window, layers in spec.window_layers.items():
        group = CacheGroup(layers, window, 0)
        size = block_bytes(spec, group, cache.block_tokens, kv_dtype, native=native)
        if draft is not None and window is None:
            drafts = (layer for layers in draft.window_layers.values() for layer in layers)
            size += (
                sum(layer_token_bytes(draft, layer, kv_dtype, native=native) for layer in drafts) * cache.block_tokens
            )

        def blocks(tokens: int, window: int | None = window) -> int:
            # A window's blocks: the window of its first query, the chunk, and one for the unaligned edges.
            held = tokens if window is None else min(tokens, window + chunk + cache.block_tokens)
            return -(-held // cache.block_tokens)

        needs.append(_GroupNeed(group, size, blocks(typical), blocks(max_model_len)))
    if spec.state_layers:
        keys = sum(need.block_bytes for need in needs)
        needs.append(_states_need(spec, keys, chunk, cache.block_tokens))
    if cache.num_blocks is not None:
        widest = max(need.typical for need in needs)
        counts = [max(need.longest, -(-cache.num_blocks * need.typical // widest)) for need in needs]
        if needs[0].group.window is None:
            counts[0] = cache.num_blocks
    else:
        counts = _counts(needs, cache, schedule, max_model_len, device)
    # block 0 is never allocated
    return tuple(replace(need.group, num_blocks=count + 1) for need, count in zip(needs, counts, strict=True))


def _states_need(spec: ModelSpec, key_bytes: int, chunk: int, block_size: int) -> _GroupNeed:
    """Return the need of the layers with states. Snapshots lie so far apart that they take no more memory than the keys
    and values between them, of `key_bytes` a block."""
    group = CacheGroup(spec.state_layers, STATE_WINDOW, 0, snapshot_blocks=1)
    size = block_bytes(spec, group, block_size)
    every = max(1, -(-size // max(1, key_bytes)))
    # Of a running row: the block before a chunk, its last two, and snapshots inside. Typically there is no chunk, but
    # a snapshot behind the prompt.
    return _GroupNeed(replace(group, snapshot_blocks=every), size, 3, 3 + -(-chunk // (every * block_size)))


def _counts(
    needs: list[_GroupNeed], cache: CacheConfig, schedule: ScheduleConfig, max_model_len: int, device: torch.device
) -> list[int]:
    """Return the blocks of each pool: as many typical sequences as fit, no more than can run, at min_bytes one
    longest."""
    budget = cache.memory_bytes
    if budget is None:
        budget = int(available_bytes(device) * cache.memory_fraction)
    min_bytes = sum(need.longest * need.block_bytes for need in needs)
    if min_bytes > budget:
        raise OutOfMemory(
            f"one sequence of {max_model_len} tokens needs {min_bytes / 2**20:.0f} MiB of KV cache, but "
            f"{budget / 2**20:.0f} MiB may be used; lower max_model_len or give the cache more memory"
        )
    sequence_bytes = sum(need.typical * need.block_bytes for need in needs)
    running = schedule.rows if cache.sequences is None else min(schedule.rows, cache.sequences)
    sequences = min(budget / sequence_bytes, max(1, running) * (1 + PREFIX_ROOM))
    counts = [max(need.longest, int(sequences * need.typical)) for need in needs]
    excess = sum(count * need.block_bytes for count, need in zip(counts, needs, strict=True)) - budget
    for i in sorted(range(len(needs)), key=lambda i: needs[i].longest - counts[i]):
        if excess > 0:  # pools with room compensate for rounding up to one longest sequence in another
            give = min(counts[i] - needs[i].longest, -(-excess // needs[i].block_bytes))
            counts[i] -= give
            excess -= give * needs[i].block_bytes
    return counts
