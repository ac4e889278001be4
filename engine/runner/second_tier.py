"""Opens the second tier of an engine's prefix cache, and stores blocks in it after steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from engine.cache.block_tier import BlockKey, BlockTier, Bytes
from engine.cache.folder_tier import FolderTier
from engine.config import EngineConfig
from engine.device_transfer import Download
from engine.errors import EngineError
from engine.runner.block_transfer import BlockTransfer
from engine.scheduler.scheduler import Scheduler

MAX_LOAD_BYTES: Final = 256 << 20
"""Bytes that one step loads; they are held on the host until it computes. The rest follows with the next ones."""

MAX_STORE_BYTES: Final = 16 << 20
"""Bytes that are copied after one step, while there is more to compute."""


class SecondTier:
    """A tier, and what copies blocks to and from it.

    Attributes:
        max_loads: blocks of a full-attention group that one step loads.
    """

    def __init__(self, tier: BlockTier, blocks: BlockTransfer) -> None:
        self.tier = tier
        self.blocks = blocks
        self.max_loads = max(1, MAX_LOAD_BYTES // sum(blocks.block_bytes))
        self._max_stores = max(1, MAX_STORE_BYTES // sum(blocks.block_bytes))

    def store(self, scheduler: Scheduler) -> None:
        """Store blocks: a few while the scheduler has work, and no more than the tier keeps up with; then all."""
        while not (scheduler.has_work and self.tier.is_busy):
            groups: defaultdict[int, list[tuple[int, BlockKey]]] = defaultdict(list)
            for block, key in scheduler.take_stores(self._max_stores):
                groups[key.group].append((block, key))
            for group, stores in groups.items():
                content = self.blocks.read(group, [block for block, _ in stores])
                for at, (_, key) in enumerate(stores):
                    self.tier.store(key, self.blocks.block_bytes[group], partial(_line, content, at))
            if scheduler.has_work or not groups:
                return


def check_second_tier(config: EngineConfig, model_digest: Callable[[], str] | None) -> None:
    """Check that the other settings allow a second tier, if one is set.

    Raises:
        EngineError: names the one that doesn't.
    """
    if config.cache.tier_folder is None:
        return
    name, method = "a second tier of the prefix cache (--kv-cache-dir)", config.speculation.method
    if method in ("draft", "eagle3"):
        raise EngineError(f"{name} doesn't hold the keys of speculate {method!r}; use ngram, auto or off")
    if not config.cache.prefix_caching:
        raise EngineError(f"{name} needs prefix_caching; leave one of them out")
    if model_digest is None:
        raise EngineError(f"{name} finds blocks by the model's digest: give Engine.load a model_digest")


def open_second_tier(config: EngineConfig, computed: tuple[object, ...], blocks: BlockTransfer) -> SecondTier:
    """Open the second tier that the settings name.

    Args:
        computed: what keys and values depend on besides tokens and settings: the model's digest, dtype, device, name
            of the kernels, maximum length. With the kernels' name, loaded blocks have the bits of computed ones.
    """
    cache = config.cache
    assert cache.tier_folder is not None
    versions = [_version(name) for name in ("tokenmill", "torch", "transformers")]  # others may compute differently
    settings = (config.own_models, config.quantize, config.kv_dtype, cache.block_tokens)
    identity = repr((versions, settings, computed, blocks.layout))
    return SecondTier(FolderTier(Path(cache.tier_folder), identity, cache.tier_bytes), blocks)


def _line(content: Download, at: int) -> Bytes:
    line: Bytes = content.numpy()[at]
    return line


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
