"""Stage `kernels`: products of all forms of weights, draws, what lies between a layer's products, and launching steps.

Each is recorded several times over as a graph, with another weight each time, so that neither the host nor the caches
show; its share is that of the larger of two times: reading and writing what it must, at the copy's bandwidth, and
computing, at the rate of the product in its form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import launches
from benchmarks.gpu.context import Context, Part, Skipped, free_memory, median_seconds, tried
from engine.adapters.adapter import LowRank
from engine.adapters.tiles import TokenTiles
from engine.device_transfer import make_transfer
from engine.models.base import LayerCache
from engine.models.experts import GroupedLinear
from engine.models.layer_ops import HeadLayout, Update
from engine.models.rope import Rotation
from engine.quant.base import Fp8Input
from engine.quant.linear import fast_kernel, int8_weight_only
from engine.quant.rtn import AT_LOAD, Rounding, round_to_nearest
from engine.quant.weight import Activations
from engine.triton_kernels import layers
from engine.triton_kernels.draws import draw_rows
from engine.triton_kernels.fp8 import GroupedFp8Product
from engine.triton_kernels.low_rank import StackedLowRank

_SECONDS = 10.0
_COPIES = 4
"""Weights in turn, so that none is found in the caches."""

NARROW = ("qkv", "o")
"""Shapes for which only the choice between the kernels of `ROWWISE` is open."""

ROWWISE = ("bf16", "fp8", "fp8, our kernel")
"""Products of weights whose rows have one factor, and what they are to be faster than."""

INPUT_SCALE = 6 / 448
"""Of inputs that are quantized by a fixed factor: random ones reach no further than 6."""

_CHECKED = 64
"""Rows whose products are compared with those of the dequantized weight."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call must move and compute.

    Attributes:
        bytes: read and written.  operations: of its products.  form: of those, a name of `Rates`.
    """

    bytes: int
    operations: int = 0
    form: str = "bf16"


def run(context: Context) -> Iterator[Part]:
    """Products first, then launches, draws, and a layer's operations."""
    full = {"gate, up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096)}
    for shape, (n, k) in context.sized(full, {"tiny": (128, 256)}).items():
        whole = products(context)
        for name, make in (whole if shape not in NARROW else {name: whole[name] for name in ROWWISE}).items():
            yield f"product {shape} {name}", tried(partial(of_product, context, make, n, k))
            free_memory(context.device)
    for name, graphs in (("graphs", True), ("eager", False)):
        yield f"launches {name}", tried(partial(launches.of_steps, context, graphs))
        free_memory(context.device)
    yield "product of experts", tried(partial(of_experts, context))
    free_memory(context.device)
    yield "adapters", tried(partial(of_adapters, context))
    free_memory(context.device)
    for name, params in draws().items():
        yield f"draws {name}", tried(partial(of_draws, context, params))
        free_memory(context.device)
    for rows in context.sized((256, 4096), (4,)):
        for name, form in (("bf16", None), ("fp8", Fp8Input(None))):
            yield f"layer {name}, {rows} rows", tried(partial(of_layer, context, rows, form))
            free_memory(context.device)


Product = tuple[Callable[[Tensor], Tensor], Tensor, int, str]
"""A product, its weight dequantized, its weight's bytes, and the form in which it computes."""


def products(context: Context) -> dict[str, Callable[[Tensor], Product]]:
    """By the form of the weight: made of a dense one [n, k]."""
    fp8 = Activations("fp8")
    found: dict[str, Callable[[Tensor], Product]] = {
        "bf16": dense, "int8 weights": int8_weights, "fp8, our kernel": partial(our_fp8, context.dry)
    }  # fmt: skip
    if not context.dry:
        found |= {
            "fp8": partial(quantized, Rounding("fp8", None, activations=fp8), "fp8"),
            "fp8 groups": partial(quantized, Rounding("fp8", 128, activations=fp8), "fp8"),
            "fp8 blocks": partial(quantized, Rounding("fp8", 128, activations=fp8), "fp8", rows=128),
            "int8": partial(quantized, Rounding("int8", None, activations=Activations("int8")), "fp8"),
            "int4 by 128": partial(quantized, Rounding("int4", 128, scale_dtype=torch.bfloat16), "bf16"),
            "int4 by 32": partial(quantized, AT_LOAD["int4"], "bf16"),
        }
    return found


def dense(weight: Tensor) -> Product:
    """torch's product, to compare with."""
    return partial(F.linear, weight=weight), weight, weight.nbytes, "bf16"


def int8_weights(weight: Tensor) -> Product:
    """As `--quantize int8-weight-only` makes it."""
    linear = int8_weight_only(weight)
    return linear, weight, weight.numel(), "bf16"


def our_fp8(interpreted: bool, weight: Tensor) -> Product:
    """fp8 with one factor for a row of the weight and one for a row of inputs, by the kernel for groups: the whole row
    is its group. The inputs' factor is fixed, for which the same kernel quantizes them as for their largest."""
    q = round_to_nearest(weight, Rounding("fp8", None, activations=Activations("fp8", INPUT_SCALE)))
    return GroupedFp8Product(q, None, interpreted), q.dequantize(weight.dtype), q.nbytes, "fp8"


def quantized(rounding: Rounding, form: str, weight: Tensor, rows: int = 1) -> Product:
    """By the kernel that the engine would choose. `rows`: of the weight that share their factors.

    Raises:
        Skipped: there is none.
    """
    q = round_to_nearest(weight, rounding)
    if rows > 1:
        assert isinstance(q.scale, Tensor)
        q = replace(q, scale=q.scale[::rows].repeat_interleave(rows, 0))
    kernel = fast_kernel(q, torch.bfloat16)
    if kernel is None:
        raise Skipped("nothing multiplies with it here")
    return kernel.prepare(q, None), q.dequantize(torch.bfloat16), q.nbytes, form


def of_product(context: Context, make: Callable[[Tensor], Product], n: int, k: int) -> dict[str, Any]:
    """Batches from thin to thick; distance from the dequantized weight's product, ‖y - wanted‖ / ‖wanted‖."""
    context.need(context.sized(_SECONDS, 0.1))
    dtype = context.sized(torch.bfloat16, torch.float32)
    made = [make((torch.randn(n, k, device=context.device) * 0.02).to(dtype)) for _ in range(context.sized(_COPIES, 1))]
    found: dict[str, Any] = {}
    for rows in context.sized((16, 64, 128, 256, 1024, 8192), (3,)):
        x = torch.randn(rows, k, device=context.device).to(dtype)
        bytes_ = made[0][2] + 2 * rows * (n + k)
        calls = [partial(product, x) for product, *_ in made]
        found[f"{rows} rows"] = timed(context, calls, Cost(bytes_, 2 * rows * n * k, made[0][3]))
        if rows <= _CHECKED:
            wanted = x.float() @ made[0][1].float().t()
            found[f"{rows} rows"]["distance"] = float((made[0][0](x).float() - wanted).norm() / wanted.norm())
    return found


def of_experts(context: Context) -> dict[str, Any]:
    """Rows of 8 experts of 128 each, with Qwen3-30B-A3B's shapes, against torch's own products one by one."""
    context.need(context.sized(_SECONDS, 0.1))
    count, n, k, chosen = context.sized((128, 1536, 2048, 8), (4, 32, 16, 2))
    weight = (torch.randn(count, n, k, device=context.device) * 0.02).to(torch.bfloat16)
    product, found = GroupedLinear(weight), {}
    for tokens in context.sized((1, 16, 256, 4096), (3,)):
        expert = torch.rand(tokens, count, device=context.device).topk(chosen).indices.flatten().sort().values
        ends = torch.bincount(expert, minlength=count).cumsum(0).int()
        x = torch.randn(len(expert), k, device=context.device).to(torch.bfloat16)
        read = len(expert.unique())
        cost = Cost(2 * (read * n * k + len(x) * (n + k)), 2 * len(x) * n * k)
        found[f"{tokens} tokens"] = timed(context, [partial(product, x, ends)] * context.sized(_COPIES, 1), cost)
        if tokens <= _CHECKED:
            wanted = torch.bmm(weight[expert].float(), x.float()[:, :, None])[:, :, 0]
            found[f"{tokens} tokens"]["distance"] = float((product(x, ends).float() - wanted).norm() / wanted.norm())
    return found


def of_adapters(context: Context) -> dict[str, Any]:
    """What 8 adapters of rank 16 add to a product of Llama-3.1-8B's gate and up (rank 32 together), rows in turn."""
    context.need(context.sized(_SECONDS, 0.1))
    places, rank, n, k = context.sized((8, 32, 28672, 4096), (2, 4, 70, 40))
    device, dtype = context.device, context.sized(torch.bfloat16, torch.float32)
    made, changes = [], [LowRank(torch.randn(rank, k) * k**-0.5, torch.randn(n, rank)) for _ in range(places)]
    for _ in range(context.sized(_COPIES, 1)):
        made.append(StackedLowRank(places, rank, k, n, dtype, device, upcast=context.dry))
        for place, change in enumerate(changes):
            made[-1].place(place, LowRank(*(matrix.to(device, dtype) for matrix in change)))
    found: dict[str, Any] = {}
    for rows in context.sized((1, 16, 64, 256, 1024, 8192), (3,)):
        x = torch.randn(rows, k, device=device).to(dtype)
        y = torch.zeros(rows, n, dtype=dtype, device=device)
        slots = (np.arange(rows) * places // rows).astype(np.int32)
        tiles = TokenTiles.of(slots, make_transfer(device))
        touched = min(rows, places) * rank * (n + k)
        cost = Cost(x.itemsize * (touched + rows * (k + 2 * n)), 2 * rows * rank * (n + k))
        made[0].add(x, y, tiles)
        if rows <= _CHECKED:
            of = [changes[slot] for slot in slots.tolist()]
            wanted = torch.stack([(one.b @ (one.a @ row)) for one, row in zip(of, x.float().cpu(), strict=True)])
            distance = float((y.float().cpu() - wanted).norm() / wanted.norm())
        found[f"{rows} rows"] = timed(context, [partial(one.add, x, y, tiles) for one in made], cost)
        if rows <= _CHECKED:
            found[f"{rows} rows"]["distance"] = distance
    return found


def draws() -> dict[str, Mapping[str, float]]:
    """Parameters of every row."""
    return {"greedy": {"temperature": 0.0}, "sampled": {}, "top_p 0.9": {"top_p": 0.9}, "top_k 50": {"top_k": 50}}


def of_draws(context: Context, params: Mapping[str, float]) -> dict[str, Any]:
    """Batches of rows of Llama 3's vocabulary, logits of about an answer's spread."""
    context.need(context.sized(_SECONDS, 0.1))
    device, vocab, found = context.device, context.sized(128_256, 300), {}
    for rows in context.sized((16, 256, 1024), (2,)):
        logits = [torch.randn(rows, vocab, device=device) * 2 for _ in range(context.sized(2, 1))]

        def column(value: float, dtype: torch.dtype, rows: int = rows) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        temperature = params.get("temperature", 1.0)
        scale = column(math.log2(math.e) / temperature if temperature else 0.0, torch.float32)
        uniform, inner = torch.rand(2, rows, dtype=torch.float64, device=device)
        columns = (
            scale, column(params.get("top_k", 0), torch.int64), column(params.get("top_p", 1.0), torch.float64),
            column(0.0, torch.float32), uniform, inner,
        )  # fmt: skip
        calls = [partial(draw_rows, each, *columns) for each in logits]
        found[f"{rows} rows"] = timed(context, calls, Cost(logits[0].nbytes))
    return found


def of_layer(context: Context, rows: int, form: Fp8Input | None) -> dict[str, Any]:
    """Llama-3.1-8B's operations between products."""
    context.need(context.sized(_SECONDS, 0.1))
    device, dtype = context.device, torch.bfloat16
    hidden, inner, heads = context.sized((4096, 14336, HeadLayout(32, 8, 128)), (64, 128, HeadLayout(4, 2, 16)))
    dim, queries, keys = heads.head_dim, heads.num_heads, heads.num_kv_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, made, norm = random(rows, hidden), random(rows, hidden), torch.ones(hidden, device=device)
    gate_up, qkv = random(rows, 2 * inner), random(rows, queries + 2 * keys, dim)
    rotation = Rotation(random(rows, 1, dim), random(rows, 1, dim))
    slots = torch.randperm(rows, device=device).int()
    cache = LayerCache(*(torch.zeros(rows, keys, dim, dtype=dtype, device=device) for _ in range(2)), None, None, slots)
    out = 1 if form is not None else 2
    # One set of buffers is no more than the caches hold: what reads it has just been written, as in a model.
    operations: dict[str, tuple[Call, int]] = {
        "add and norm": (
            lambda: layers.add_norm(x, Update(made), norm, 1e-5, form, interpreted=context.dry),
            rows * hidden * (6 + out),
        ),
        "rotate and store": (
            lambda: layers.rotate_and_store(heads, qkv, None, rotation, None, cache, 1e-5, interpreted=context.dry),
            4 * rows * (queries + 2 * keys) * dim,
        ),
        "activate": (
            lambda: layers.activate("silu", gate_up, form, interpreted=context.dry),
            rows * inner * (4 + out),
        ),
    }
    return {
        name: timed(context, [call] * context.sized(4, 1), Cost(moved)) for name, (call, moved) in operations.items()
    }


def timed(context: Context, calls: list[Call], cost: Cost) -> dict[str, Any]:
    """The mean of one call, and its share of the least time."""
    repeats = context.sized(20, 1)
    seconds = median_seconds(recorded(calls, context.device), context.device, repeats=repeats) / len(calls)
    found: dict[str, Any] = {"seconds": seconds}
    if context.rates is not None:
        rate = getattr(context.rates, cost.form) or math.inf
        least = max(cost.bytes / context.rates.bandwidth, cost.operations / rate)
        found |= {"least_seconds": least, "share": least / seconds}
    return found


def recorded(calls: list[Call], device: torch.device) -> Call:
    """All of them one after the other: on a GPU as a graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return all_of_them
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and lets libraries take their workspaces
        all_of_them()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        all_of_them()
    return graph.replay
