"""Blocks to host memory and back: the bytes are right, whatever the device still has to copy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.block_tier import BlockKey
from engine.cache.host_tier import HostTier
from engine.plan import BlockLoad, BlockStore
from engine.runner import block_transfer
from engine.runner.block_transfer import BlockTransfer
from engine.runner.second_tier import SecondTier
from tests.engine.runner.fake_cuda import DEVICE, compiler, fake_cuda

needs_fake = pytest.mark.skipif(
    torch.cuda.is_available() or compiler() is None,
    reason="NOT TESTED HERE: a fake CUDA device; there is no C++ compiler, or a real device",
)
LINES = 8


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(group, bytes([number]), b"")


def tensors(device: torch.device) -> list[list[torch.Tensor]]:
    """Two groups of lines whose bytes differ, of two dtypes."""
    values = torch.arange(LINES * 6, dtype=torch.float32).view(LINES, 2, 3)
    return [
        [values.to(device), (values[:, 0] + 100).to(torch.bfloat16).to(device)],
        [(values + 500).to(device)],
    ]


def fake(device: str) -> AbstractContextManager[Any]:
    return fake_cuda(triton=False) if device == "cuda" else nullcontext()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_fake)])
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_evicted_blocks_come_back_to_other_places(
    device: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_transfer, "BUFFER_BYTES", buffer_bytes)
    with fake(device) as active:
        cache = tensors(DEVICE if device == "cuda" else torch.device("cpu"))
        before = [[tensor.cpu().clone() for tensor in group] for group in cache]
        blocks = BlockTransfer(cache)
        host = HostTier(blocks.allocate_host([5, 5]))
        tiers = SecondTier(host, None, None, blocks)
        if active is not None:
            active.waits.clear()
        # Given blocks that are stored, and written to by the same step,
        tiers.store_evicted([BlockStore(1 + at, key(at, group)) for group in (0, 1) for at in range(3)])
        for tensor in (tensor for group in cache for tensor in group):
            tensor.zero_()
        # when they are loaded, before the host has waited for anything,
        loads = []
        for group in (0, 1):
            for at in range(3):
                data = host.load(key(at, group))
                assert data is not None
                loads.append(BlockLoad(group, 7 - at, data))
        tiers.load(loads)
        if active is not None:
            assert active.waits == []
        # then they are what they were.
        for group, old in zip(cache, before, strict=True):
            for tensor, values in zip(group, old, strict=True):
                assert tensor.cpu()[[7, 6, 5]].equal(values[[1, 2, 3]])
                assert not tensor.cpu()[:5].any()


@needs_fake
def test_blocks_of_a_disk_and_of_host_memory_are_loaded_by_one_step() -> None:
    with fake_cuda(triton=False):
        cache = tensors(DEVICE)
        blocks = BlockTransfer(cache)
        host = HostTier(blocks.allocate_host([2, 2]))
        tiers = SecondTier(host, None, None, blocks)
        tiers.store_evicted([BlockStore(1, key(1))])
        data = host.load(key(1))
        assert data is not None
        tiers.load([BlockLoad(0, 4, data), BlockLoad(0, 5, np.zeros(blocks.block_bytes[0], dtype=np.uint8))])
        assert cache[0][0][4].cpu().equal(cache[0][0][1].cpu())
        assert not cache[0][0][5].cpu().any()


def test_a_slot_is_free_again_once_the_step_that_loads_it_was_submitted() -> None:
    blocks = BlockTransfer(tensors(torch.device("cpu")))
    host = HostTier(blocks.allocate_host([1, 1]))
    tiers = SecondTier(host, None, None, blocks)
    tiers.store_evicted([BlockStore(1, key(1))])
    data = host.load(key(1))
    assert data is not None
    tiers.store_evicted([BlockStore(2, key(2))])
    assert not host.contains(key(2))
    tiers.load([BlockLoad(0, 5, data)])
    tiers.store_evicted([BlockStore(2, key(2))])
    assert host.contains(key(2))


@needs_fake
def test_the_memory_of_all_groups_is_page_locked_until_it_is_freed() -> None:
    with fake_cuda(triton=False) as device:
        blocks = BlockTransfer(tensors(DEVICE))
        host = HostTier(blocks.allocate_host([5, 3]))
        assert list(device.locked.values()) == [5 * blocks.block_bytes[0] + 3 * blocks.block_bytes[1]]
        del blocks
        assert device.locked
        del host
        assert not device.locked
