"""Compiles what our own code launches for a GPU that is not there: `python -m tests.engine.triton.compiling PART 90`.

Each launch goes through Triton's own `run`, with its real arguments, but for the last step: the kernel is compiled for
the device that is named (down to its machine code, by the ptxas that comes with Triton) and not started. What comes out
is a JSON list of what was compiled: kernel, bytes of shared memory. It needs a process of its own, without Triton's
interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import engine.triton_kernels.attention as kernels
from engine.adapters.tiles import TokenTiles
from engine.attention import AttentionBatch, KVLayout
from engine.attention.base import WARM_UP_TOKENS
from engine.attention.triton_paged import TritonPagedAttention
from engine.device_transfer import make_transfer
from engine.plan import CacheGroup
from engine.quant.rtn import Rounding, round_to_nearest
from engine.quant.weight import Activations
from engine.runner.buckets import GraphShape, padded
from engine.triton_kernels.draws import draw_rows
from engine.triton_kernels.fp8 import GroupedFp8Product, quantize_rows
from engine.triton_kernels.low_rank import StackedLowRank
from engine.triton_kernels.small_weights import SmallWeightProduct

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn

SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, table of technical
specifications, "Maximum amount of shared memory per thread block")."""


class Device:
    """A device of this compute capability, as far as compiling goes."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_instead(capability: int) -> list[Any]:
    """From now on launches compile; the kernels (`triton.compiler.CompiledKernel`) are appended to the list, once
    each."""
    driver.set_active(Device(capability))
    compiled: list[Any] = []
    run = JITFunction.run

    def compiling(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if all(kernel.hash != other.hash for other in compiled):
            compiled.append(kernel)
        return kernel

    JITFunction.run = compiling
    return compiled


def batch(starts: list[int], counts: list[int], block_size: int, *, shared: bool = False) -> AttentionBatch:
    """A step of these sequences, over any blocks: `shared`: the same ones for all, else each has its own."""
    ends = np.array(starts) + np.array(counts)
    width = -(-int(ends.max()) // block_size)
    decodes = int(np.count_nonzero(np.array(counts) == 1))
    tables = np.ones((len(starts), width), np.int32)
    if not shared:
        tables *= np.arange(1, len(starts) + 1, dtype=np.int32)[:, None]
    slots = np.arange(int(sum(counts)), dtype=np.int64)
    return AttentionBatch(np.array(starts, np.int32), np.array(counts, np.int32), decodes, (tables,), (slots,))


def attention(
    capability: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    head_dim: int,
    steps: list[AttentionBatch],
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> TritonPagedAttention:
    """All these steps by one backend, with the shapes of a model of 8 heads that share 2."""
    layout = KVLayout((CacheGroup((0,), window, 8),), 32, 2, head_dim, 8)
    backend = TritonPagedAttention(layout, cache, CPU, processors=132, shared=SHARED[capability])
    for step in steps:
        attend(backend, int(step.counts.sum()), dtype, backend.prepare(step), sinks)
    return backend


def attend(
    backend: TritonPagedAttention, tokens: int, dtype: torch.dtype, prepared: Any, sinks: torch.Tensor | None = None
) -> None:
    """A layer's attention of a prepared step."""
    dim = backend.storage.layout.head_dim
    qk = torch.zeros(tokens, 10, dim, dtype=dtype)
    q, k = qk.tensor_split((8,), dim=1)
    backend.attend(0, q, k, torch.zeros(tokens, 2, dim, dtype=dtype), dim**-0.5, prepared, sinks)


def shapes(capability: int) -> None:
    """Attention in all dtypes, head sizes and forms of a step; for other devices than Hopper what takes most room."""
    steps = [batch([900, 40], [1, 1], 32), batch([500, 0, 64], [1, 70, 33], 32)]
    steps.append(batch([5000] * 64, [1] * 64, 32, shared=True))
    dtypes = [(torch.float16, torch.float16, 128)]
    if capability >= 80:
        dtypes += [(torch.bfloat16, torch.bfloat16, 256), (torch.float32, torch.float32, 128)]
    if capability == 90:
        dtypes += [(torch.bfloat16, torch.bfloat16, 64), (torch.bfloat16, torch.bfloat16, 128)]
        dtypes += [(torch.bfloat16, FP8, 128), (torch.float16, FP8, 128), (torch.bfloat16, FP8, 256)]
    for dtype, cache, head_dim in dtypes:
        attention(capability, dtype, cache, head_dim, steps, window=None)
    attention(capability, torch.float16, torch.float16, 80, steps, window=48)
    attention(capability, torch.float16, torch.float16, 512, steps, window=None)  # Gemma 4's
    attention(capability, torch.float16, torch.float16, 64, steps, window=128, sinks=torch.zeros(8))
    layout = KVLayout((CacheGroup((0,), None, 8),), 32, 1, 576, 20, latent_dim=512)  # DeepSeek's
    latent = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8)] if capability == 90 else []
    if 80 <= capability < 90:  # an older device has too little shared memory for it
        latent = [(torch.float16, torch.float16)]
    for dtype, cache in latent:
        backend = TritonPagedAttention(layout, cache, CPU, processors=132, shared=SHARED[capability])
        for step in steps:
            q = torch.zeros(int(step.counts.sum()), 20, 576, dtype=dtype)
            backend.attend(0, q, q[:, :1], q[:, :1, :512], 0.1, backend.prepare(step))


def sizes(capability: int) -> None:
    """The step that compiles all; then steps of all sizes and lengths, as they come while requests come and go, and the
    same padded for graphs."""
    rng = np.random.default_rng(3)
    steps = []
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33):
        chunks = int(rng.integers(0, 3))
        counts = [1] * rows + rng.integers(2, 40, chunks).tolist()
        steps.append(batch(rng.integers(0, 250, len(counts)).tolist(), counts, 32))
    steps += [batch([length] * rows, [1] * rows, 32) for length in (600, 5000) for rows in (1, 2, 3, 7)]
    steps.append(batch([6000, 9000], [1, 500], 32))
    shared = [batch([9000] * rows, [1] * rows, 32, shared=True) for rows in (32, 33, 47)]
    steps += [*shared, batch([9000] * 33, [1] * 32 + [40], 32, shared=True)]
    backend = attention(capability, torch.float16, torch.float16, 64, [], window=None)
    attend(backend, WARM_UP_TOKENS, torch.float16, backend.warm_up_step())
    for step in steps:
        attend(backend, int(step.counts.sum()), torch.float16, backend.prepare(step))
    for tokens in (64, 24, 20, 17, 16):
        shape = GraphShape(tokens, 34, 33, True)
        for reserve in (backend.reserve, backend.reserve_shared):
            reserved = reserve(tokens, 34, min(33, tokens), True, 11)
            backend.refill(reserved, padded(batch([5, 9], [1, 6], 32), shape))
            attend(backend, tokens, torch.float16, reserved)


def products(capability: int) -> None:
    """Products with small weights and with fp8 ones, of thin and thick batches."""
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(1))
    roundings = [Rounding("int4", 32), Rounding("int4", 128, symmetric=True), Rounding("int8", None, symmetric=True)]
    for rounding in roundings:
        product = SmallWeightProduct(round_to_nearest(weight, rounding), torch.zeros(256), processors=132)
        for rows in (1, 3, 16, 20, 32, 48, 64, 70, 128, 129, 1000):
            product(torch.zeros(rows, 2048, dtype=torch.float16))
    if capability < 89:
        return
    grouped = round_to_nearest(weight, Rounding("fp8", 128, activations=Activations("fp8")))
    product = GroupedFp8Product(grouped, None)
    for rows in (1, 3, 16, 20, 64):
        product(torch.zeros(rows, 2048, dtype=torch.bfloat16))
        quantize_rows(torch.zeros(rows, 2048, dtype=torch.bfloat16))


def low_rank(capability: int) -> None:
    """Products of adapters in steps of several sizes, launched and padded for graphs."""
    dtype = torch.float16 if capability < 80 else torch.bfloat16
    shapes = [(24, 2048, 2048), (24, 2048, 3072), (768, 2048, 3000)]
    for stacked in [StackedLowRank(4, *shape, dtype, CPU) for shape in shapes]:
        k, n = stacked._a.shape[2], stacked._b.shape[2]
        for tokens in (1, 3, 16, 17, 48, 513, 1000):
            slots = (np.arange(tokens, dtype=np.int32) % 5) - 1
            reserved = TokenTiles.reserve(tokens, 4, CPU)
            reserved.refill(slots)
            for tiles in (TokenTiles.of(slots, make_transfer(CPU)), reserved):
                stacked.add(torch.zeros(tokens, k, dtype=dtype), torch.zeros(tokens, n, dtype=dtype), tiles)


def draw(rows: int, vocab: int) -> None:
    """A step's draws, whose parameters lie anywhere in one buffer."""
    top_p, uniform = torch.empty(2, rows + 1, dtype=torch.float64)[:, :rows]
    scale, min_p = torch.empty(2, rows + 1)[:, :rows]
    top_k = torch.empty(rows + 1, dtype=torch.int64)[1:]
    draw_rows(torch.empty(rows, vocab), scale, top_k, top_p, min_p, uniform, uniform)


def draws(capability: int) -> None:
    """Draws of steps of several sizes."""
    for rows in (1, 2, 3, 16, 17):
        draw(rows, 2000)


PARTS: dict[str, Callable[[int], None]] = {
    "shapes": shapes, "sizes": sizes, "products": products, "draws": draws, "low_rank": low_rank,
}  # fmt: skip

if __name__ == "__main__":
    assert isinstance(kernels.attend_tiles, JITFunction), "Triton's interpreter is on"
    found = compile_instead(int(sys.argv[2]))
    PARTS[sys.argv[1]](int(sys.argv[2]))
    print(json.dumps([{"kernel": each.metadata.name, "shared": each.metadata.shared} for each in found]))
