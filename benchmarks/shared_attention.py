"""A decoding step's attention on a CPU where rows begin with the same blocks, beside the same with blocks of their own.

    python benchmarks/shared_attention.py [--rows 8 32 …] [--shared 256 1024 …] [--kv bf16 int8] [--json FILE]

All layers of a model are attended to one after the other, so that keys and values come from memory; what is between the
layers is left out. The defaults are SmolLM2-135M's shape. Both forms take turns, over copies of the same random
numbers, and ratios are taken within a turn; their results are compared to the bit. Times are of one thread's processor,
which other work on the machine disturbs less than time on a clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from throughput import machine
from torch import Tensor

from engine.attention import AttentionBatch, KVLayout
from engine.attention.native import NativeAttention, NativeStep
from engine.native.library import NativeLibrary, load_library
from engine.native.structs import ElementKind
from engine.plan import CacheGroup

BLOCK = 32
KINDS = {"bf16": None, "int8": ElementKind.I8}


def numbers(tokens: int, args: argparse.Namespace) -> list[Tensor]:
    """Random q, k and v."""
    made = torch.Generator().manual_seed(tokens)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    return [torch.randn(tokens, count, args.head_dim, generator=made).bfloat16() for count in heads]


def step_of(attention: NativeAttention, table: np.ndarray, start: int, count: int) -> NativeStep:
    """A step of `count` tokens for each line of a block table."""
    rows, at = len(table), np.arange(start, start + count)
    slots = (table[:, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK).ravel()
    starts, counts = np.full(rows, start, np.int32), np.full(rows, count, np.int32)
    return attention.prepare(AttentionBatch(starts, counts, rows if count == 1 else 0, (table,), (slots,)))


def attend(attention: NativeAttention, step: NativeStep, qkv: list[Tensor], layers: int) -> list[Tensor]:
    """All layers' results."""
    q, k, v = qkv
    return [attention.attend(layer, q, k, v, q.shape[2] ** -0.5, step) for layer in range(layers)]


def measure(args: argparse.Namespace, library: NativeLibrary, kv: str, rows: int, shared: int) -> dict[str, Any]:
    """Processor seconds of all layers with blocks of their own and with shared ones, turn by turn."""
    length = shared + args.own
    width = length // BLOCK + 1
    layout = KVLayout(
        (CacheGroup(tuple(range(args.layers)), None, 1 + rows * width),),
        BLOCK,
        args.kv_heads,
        args.head_dim,
        args.heads,
    )
    attention = NativeAttention(layout, torch.bfloat16, library, KINDS[kv])
    apart = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    attend(attention, step_of(attention, apart[:1], 0, length), numbers(length, args), args.layers)
    for stored in attention.block_tensors(0):
        for table in apart[1:]:
            stored[table.tolist()] = stored[apart[0].tolist()]
    together = apart.copy()
    together[:, : shared // BLOCK] = apart[0, : shared // BLOCK]
    steps = [step_of(attention, table, length, 1) for table in (apart, together)]
    qkv = numbers(rows, args)
    first, second = (attend(attention, step, qkv, args.layers) for step in steps)
    assert all(map(torch.equal, first, second)), "a shared prefix changed an answer"
    turns = []
    for _ in range(args.turns):
        seconds = []
        for step in steps:
            begun = time.process_time()
            attend(attention, step, qkv, args.layers)
            seconds.append(time.process_time() - begun)
        turns.append(seconds)
    ratios = sorted(alone / shared_seconds for alone, shared_seconds in turns)
    found = {"kv": kv, "rows": rows, "shared": shared, "own": args.own, "seconds": turns, "ratios": ratios}
    apart_ms, shared_ms = (1000 * statistics.median(each) for each in zip(*turns, strict=True))
    quarter = len(ratios) // 4
    print(
        f"{kv}, {rows} rows, {shared} shared and {args.own} own: {apart_ms:.1f} ms apart, {shared_ms:.1f} ms shared,"
        f" {statistics.median(ratios):.2f} times as fast ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--shared", type=int, nargs="+", default=[256, 1024, 2048], help="tokens, whole blocks of 32")
    parser.add_argument("--own", type=int, default=100, help="tokens of each row behind them")
    parser.add_argument("--kv", nargs="+", choices=KINDS, default=["bf16"])
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    library = load_library("auto", 1)
    results = [
        measure(args, library, kv, rows, shared) for kv in args.kv for rows in args.rows for shared in args.shared
    ]
    shape = {name: getattr(args, name) for name in ("heads", "kv_heads", "head_dim", "layers")}
    report = {"shape": shape, "instruction_set": library.name, "machine": machine(), "results": results}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
