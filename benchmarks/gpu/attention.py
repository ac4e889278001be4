"""Stage `attention`: our kernel against the float32 oracle, and timed beside the best library that is there.

Blocks that no sequence holds are NaN, so a key read beyond a sequence's end is seen. Timed are single calls for one
layer of an 8B model, over more keys than the caches hold: bytes of keys and values over time for decoding, operations
over time for prompts, each also as a share of what the machine was measured to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import libraries
from benchmarks.gpu.cases import Case, Made, make
from benchmarks.gpu.context import Context, Part, Skipped, free_memory, median_seconds, parts, tried
from engine.attention import AttentionBackend, make_backend
from engine.attention.flash import LIBRARIES as ADAPTERS
from engine.attention.flash import Library, flash_attention
from engine.attention.reference import ReferenceAttention

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Most that ‖out - oracle‖ / ‖oracle‖ may be."""

_CASE_SECONDS = 10.0


def backend_of(name: str, made: Made, cache: torch.dtype, device: torch.device) -> AttentionBackend:
    """A backend of the engine's with the case's keys in its cache, written by itself, and NaN where none is. `cache`:
    its dtype; float8_e4m3fn beside queries of another one."""
    fp8 = cache == torch.float8_e4m3fn
    backend = make_backend(name, made.layout, made.q.dtype if fp8 else cache, device, fp8=fp8)
    poison(backend)
    return filled(backend, made)


def filled(backend: AttentionBackend, made: Made) -> AttentionBackend:
    """With the case's keys in its cache, written by itself."""
    k, v = made.k[~made.new], made.v[~made.new]
    if isinstance(backend, ReferenceAttention):  # which would need all scores of the longest sequence at once
        backend.storage.write(0, k, v, made.slots[~made.new])
    elif made.filling is not None:
        q = made.q[:1].expand(len(k), -1, -1)
        backend.attend(0, q, k, v, made.case.head_dim**-0.5, backend.prepare(made.filling))
    return backend


def poison(backend: AttentionBackend) -> None:
    """Fill the cache with NaN; of one in 8 bits its scales, where it has any."""
    storage = getattr(backend, "storage", None)
    for name in ("keys", "values", "key_scales", "value_scales"):
        for tensor in getattr(storage, name, None) or ():
            if tensor.dtype.itemsize > 1:
                tensor.fill_(torch.nan)


def attend(backend: AttentionBackend, made: Made) -> Callable[[], Tensor]:
    """One call for a step that is prepared."""
    step = backend.prepare(made.batch)
    scale = made.case.head_dim**-0.5
    k, v = made.k[made.new], made.v[made.new]
    return lambda: backend.attend(0, made.q, k, v, scale, step)


def oracle(made: Made) -> Tensor:
    """By definition, in float32."""
    device = made.q.device
    exact = replace(made, q=made.q.float(), k=made.k.float(), v=made.v.float())
    return attend(backend_of("reference", exact, torch.float32, device), exact)()


def distance(out: Tensor, wanted: Tensor) -> float:
    """‖out - wanted‖ / ‖wanted‖; infinite where out has a number that is none."""
    found = float((out.float() - wanted).norm() / wanted.norm())
    return found if np.isfinite(found) else float("inf")


def check(context: Context, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Our kernel against the oracle, at one shape."""
    made = make(case, dtype, context.device)
    out = attend(backend_of("triton", made, dtype, context.device), made)()
    off = distance(out, oracle(made))
    return {"distance": off, "allowed": TOLERANCE[dtype], "ok": off <= TOLERANCE[dtype]}


def check_cases(context: Context) -> dict[str, Case]:
    """Shapes to check: several lengths, a chunk in the middle, other head counts, long keys that are split."""
    if context.dry:
        small = {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 16}
        return {
            "mixed": Case("mixed", (3, 17), ((5, 9),), **small),
            "shared": Case("shared", (40, 33, 50), ((5, 9),), shared=32, **small),
        }
    return {
        "mixed": Case("mixed", (1, 31, 32, 700, 2047), ((0, 33), (64, 700), (1000, 1))),
        "qwen heads": Case("qwen heads", tuple(range(1, 400, 7)), ((100, 200),), heads=16, kv_heads=2),
        "head_dim 64": Case("head_dim 64", (5, 900), ((7, 65),), heads=9, kv_heads=3, head_dim=64),
        "long": Case("long", (30_000, 8_000)),
        "shared": Case("shared", tuple(range(3000, 4200, 20)), ((100, 200),), shared=2976),
        "blocks of 16": Case("blocks of 16", (100, 333), ((40, 300),), block_size=16),
    }


def timed_cases(context: Context) -> list[Case]:
    """Shapes to time."""
    if context.dry:
        return [Case("decode 2 x 20", (20, 20), heads=4, kv_heads=2, head_dim=16, block_size=16)]
    return [
        Case("decode 256 x 1152", (1151,) * 256),
        Case("decode 256 x 1500", (1499,) * 256),
        Case("decode 64 x 8192", (8191,) * 64),
        Case("decode 256 x 2500, 1984 shared", (2499,) * 256, shared=1984),
        Case("decode 1 x 32768", (32767,)),
        Case("decode 4 x 8192", (8191,) * 4),
        Case("prompts 4 x 2048", (), ((0, 2048),) * 4),
        Case("mixed 255 x 1500 + 2048", (1499,) * 255, ((0, 2048),)),
    ]


def run(context: Context) -> Iterator[Part]:
    """Checks first, then times."""
    dtypes = context.sized((torch.float32, torch.bfloat16), (torch.float32,))
    for name, case in check_cases(context).items():
        for dtype in dtypes:
            label = f"check {name} {str(dtype).removeprefix('torch.')}"
            yield from parts({label: partial(check, context, case, dtype)})
    for case in timed_cases(context):
        yield f"time {case.name}", tried(partial(timings, context, case))
        free_memory(context.device)


def timings(context: Context, case: Case) -> dict[str, Any]:
    """All that is there on one shape, ours first; the ratio over one is how many times as fast ours is."""
    context.need(context.sized(_CASE_SECONDS, 0.5))
    dtype = context.sized(torch.bfloat16, torch.float32)
    made = make(case, dtype, context.device)
    calls: dict[str, Callable[[], Any]] = {
        "triton (ours)": lambda: attend(backend_of("triton", made, dtype, context.device), made),
        "triton, fp8 cache (ours)": lambda: attend(
            backend_of("triton", made, torch.float8_e4m3fn, context.device), made
        ),
    }
    calls |= {name: partial(make_call, made, context) for name, make_call in libraries.LIBRARIES.items()}
    calls |= {f"{name} (our adapter)": partial(adapter, library, made) for name, library in ADAPTERS.items()}
    wanted = oracle(made) if case.pairs * case.heads < 4e9 else None
    found = {name: tried(partial(timing, context, made, each, name, wanted)) for name, each in calls.items()}
    ours = found["triton (ours)"].get("seconds")
    for one in found.values():
        if ours and "seconds" in one:
            one["ours_is_faster_by"] = one["seconds"] / ours
    return {"case": {"starts": case.starts[:4], "sequences": len(case.starts), "pairs": case.pairs}, "runs": found}


def adapter(library: Library, made: Made) -> Callable[[], Tensor]:
    """Our engine's own use of a library, with new keys written in the same call, over blocks that the library takes."""
    if made.layout.block_size % library.page:
        made = make(replace(made.case, block_size=library.page), made.q.dtype, made.q.device)
    if (reason := library.refusal(made.layout, made.q.dtype, made.q.device)) is not None:
        raise Skipped(f"{library.name} {reason}")
    if (found := library.find(False)) is None:
        raise Skipped(f"{library.package} can't be imported here")
    return attend(filled(flash_attention(library, made.layout, made.q.dtype, made.q.device, found), made), made)


def timing(
    context: Context, made: Made, make_call: Callable[[], Callable[[], Tensor]], name: str, wanted: Tensor | None
) -> dict[str, Any]:
    """One of them: time, bandwidth, rate, and how far from the oracle (None: too large a shape for it)."""
    call = make_call()
    out = call()
    seconds = median_seconds(call, context.device, repeats=context.sized(20, 1), warmups=context.sized(3, 0))
    item = 1 if "fp8" in name else made.q.element_size()
    case = made.case
    bandwidth = 2 * case.kv_tokens * case.kv_heads * case.head_dim * item / seconds
    operations = 4 * case.heads * case.head_dim * case.pairs / seconds
    found: dict[str, Any] = {
        "seconds": seconds,
        "bytes_per_second": bandwidth,
        "operations_per_second": operations,
        "distance": None if wanted is None else distance(out.reshape(wanted.shape), wanted),
    }
    if context.rates is not None:
        found["share_of_bandwidth"] = bandwidth / context.rates.bandwidth
        found["share_of_rate"] = operations / context.rates.bf16
    return found
