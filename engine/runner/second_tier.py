"""Opens the second tiers of an engine's prefix cache, and copies blocks to and from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from engine.cache.block_tier import BlockKey, BlockTier, Bytes
from engine.cache.folder_tier import FolderTier
from engine.cache.host_tier import HostTier
from engine.cache.imported_blocks import ImportedBlocks
from engine.config import EngineConfig
from engine.device_transfer import Download
from engine.errors import EngineError, OutOfMemory
from engine.plan import BlockLoad, BlockStore, CacheGroup
from engine.runner.block_transfer import BlockTransfer
from engine.runner.memory import available_bytes
from engine.scheduler.scheduler import Scheduler

MAX_LOAD_BYTES: Final = 256 << 20
"""Bytes that one step loads; those of a disk are held on the host until it computes. The rest follows with the next
ones."""

MAX_STORE_BYTES: Final = 16 << 20
"""Bytes that are copied for the disk after one step, while there is more to compute."""


class SecondTier:
    """Tiers in host memory, of imported blocks and on a disk (None: there is none of this kind), and what copies blocks
    to and from them.

    Attributes:
        max_loads: blocks of a full-attention group that one step loads.
        block_bytes: per group, bytes of a block.
    """

    def __init__(
        self, host: HostTier | None, imported: ImportedBlocks | None, disk: BlockTier | None, blocks: BlockTransfer
    ) -> None:
        self.host = host
        self.imported = imported
        self.disk = disk
        self.block_bytes = tuple(blocks.block_bytes)
        self.max_loads = max(1, MAX_LOAD_BYTES // sum(blocks.block_bytes))
        self._blocks = blocks
        self._max_stores = max(1, MAX_STORE_BYTES // sum(blocks.block_bytes))

    def store_evicted(self, stores: Sequence[BlockStore]) -> None:
        """Copy evicted blocks to host memory, before a step writes to them."""
        copies: defaultdict[int, tuple[list[int], list[Bytes]]] = defaultdict(lambda: ([], []))
        for block, key, is_suspect in stores:
            assert self.host is not None, "only host memory gets evicted blocks"
            if (target := self.host.allocate(key, is_suspect=is_suspect)) is not None:
                blocks, targets = copies[key.group]
                blocks.append(block)
                targets.append(target)
        for group, (blocks, targets) in copies.items():
            self._blocks.read_into(group, blocks, targets)

    def load(self, loads: Sequence[BlockLoad]) -> None:
        """Fill blocks of a step before it computes."""
        self._blocks.write(loads)
        if self.host is not None:
            self.host.release()

    def store(self, scheduler: Scheduler) -> None:
        """Store blocks on the disk, after a step: a few while the scheduler has work, and no more than the disk keeps
        up with; then all."""
        if self.disk is None:
            return
        while not (scheduler.has_work and self.disk.is_busy):
            groups: defaultdict[int, list[tuple[int, BlockKey]]] = defaultdict(list)
            for block, key, _ in scheduler.take_stores(self._max_stores):
                groups[key.group].append((block, key))
            for group, stores in groups.items():
                content = self._blocks.read(group, [block for block, _ in stores])
                for at, (_, key) in enumerate(stores):
                    self.disk.store(key, self._blocks.block_bytes[group], partial(_line, content, at))
            if scheduler.has_work or not groups:
                return

    def read(self, blocks: Sequence[tuple[BlockKey, int]]) -> list[tuple[BlockKey, Callable[[], Bytes]]]:
        """Copy blocks as they are after the steps submitted so far. Returns what waits for each one's bytes, uint8
        [bytes], on any thread."""
        found: list[tuple[BlockKey, Callable[[], Bytes]]] = []
        for group in sorted({key.group for key, _ in blocks}):
            own = [(key, block) for key, block in blocks if key.group == group]
            content = self._blocks.read(group, [block for _, block in own])
            found += [(key, partial(_line, content, at)) for at, (key, _) in enumerate(own)]
        return found

    def close(self) -> None:
        """Complete what is being stored on the disk."""
        if self.disk is not None:
            self.disk.close()


def check_second_tier(config: EngineConfig, model_digest: Callable[[], str] | None) -> None:
    """Check that the other settings allow second tiers, if any are set.

    Raises:
        EngineError: names the one that doesn't.
    """
    if not (options := config.cache.second_tiers):
        return
    name, method = f"a second tier of the prefix cache ({options})", config.speculation.method
    if method in ("draft", "eagle3"):
        raise EngineError(f"{name} doesn't hold the keys of speculate {method!r}; use ngram, auto or off")
    if not config.cache.prefix_caching:
        raise EngineError(f"{name} needs prefix_caching; leave one of them out")
    by_digest = config.cache.tier_folder is not None or config.cache.exchange_bytes is not None
    if by_digest and model_digest is None:
        raise EngineError(f"{name} finds blocks by the model's digest: give Engine.load a model_digest")


def open_second_tier(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    blocks: BlockTransfer,
    identity: str | None,
) -> SecondTier | None:
    """Open the second tiers that the settings name; None: they name none.

    Args:
        identity: of the blocks (`block_identity`), where a tier is shared with other engines.

    Raises:
        OutOfMemory: the host memory that the settings name isn't free, or not even a block fits it.
    """
    cache = config.cache
    host, imported, disk = None, None, None
    if cache.host_bytes is not None:
        host = HostTier(blocks.allocate_host(host_blocks(cache.host_bytes, groups, blocks.block_bytes)))
    if cache.exchange_bytes is not None:
        imported = ImportedBlocks(cache.exchange_bytes)
    if cache.tier_folder is not None:
        assert identity is not None, "check_second_tier has refused this"
        disk = FolderTier(Path(cache.tier_folder), identity, cache.tier_bytes)
    if host is None and imported is None and disk is None:
        return None
    return SecondTier(host, imported, disk, blocks)


def block_identity(
    config: EngineConfig, model_digest: str, computed: tuple[object, ...], layout: Sequence[object]
) -> str:
    """Return what blocks of two engines must have in common so that one can use the other's: all that their bytes
    depend on besides tokens and owner.

    Args:
        computed: what keys and values depend on besides the model, tokens and settings: dtype, device, name of the
            kernels, maximum length. With the kernels' name, loaded blocks have the bits of computed ones.
        layout: `BlockTransfer.layout`.
    """
    versions = [_version(name) for name in ("tokenmill", "torch", "transformers")]  # others may compute differently
    settings = (config.own_models, config.quantize, config.kv_dtype, config.cache.block_tokens)
    return repr((versions, settings, (model_digest, *computed), layout))


def host_blocks(size: int, groups: Sequence[CacheGroup], block_bytes: Sequence[int]) -> list[int]:
    """Divide `size` bytes of host memory among the cache groups as the device's memory is; returns blocks.

    Raises:
        OutOfMemory: they are not free, or hold no block of a group.
    """
    free = available_bytes(torch.device("cpu"))
    if size > free:
        raise OutOfMemory(
            f"{size / 2**30:.1f} GiB of host memory for the KV cache (--kv-offloading-size) are more than the "
            f"{free / 2**30:.1f} GiB that are free"
        )
    total = sum(group.num_blocks * of_block for group, of_block in zip(groups, block_bytes, strict=True))
    counts = [size * group.num_blocks // total for group in groups]
    if not min(counts):
        raise OutOfMemory(
            f"{size} bytes of host memory for the KV cache (--kv-offloading-size) hold no block of each kind, of "
            f"{' and '.join(map(str, block_bytes))} bytes"
        )
    return counts


def _line(content: Download, at: int) -> Bytes:
    line: Bytes = content.numpy()[at]
    return line


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
