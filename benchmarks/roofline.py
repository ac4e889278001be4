"""How close a run came to what this machine allows, whatever the kernels: the roofline, step by step.

    python benchmarks/roofline.py benchmarks/workloads/mixed.jsonl --model MODEL [--set quantize:int8,…] [--json FILE]

A step takes at least max(bytes moved / measured bandwidth, operations / measured register peak) (Williams et al. 2009,
Roofline). Bytes: the layers' weights once, the head's when logits are wanted, keys and values that the rows see once
each (shared blocks once for all), and those written. Operations: two a parameter and token in the layers, two a head
parameter and logits row, and two a (query, key) pair, head and dimension for the scores, and again for the values; of
the last layer only keys and values are computed for positions without logits, for nothing else of theirs is read.
Activations, norms, sampling and the scheduler count nothing, so the limit is never reached. Bandwidth and peaks are
measured in the same run, before it and after it, and the higher values count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from engine_settings import SettingError, parse_overrides, with_overrides
from machine_peaks import MachinePeaks, PeaksError, disturbed, measure
from step_record import StepRecord, StepRecorder
from throughput import machine, run_once
from workload import load_prompts

from engine import CacheConfig, Engine, EngineConfig
from engine.checkpoints.config import folder_config
from engine.models.decoder import DecoderSpec
from engine.models.families.registry import fused_family
from engine.models.gguf import GGUFCheckpoint
from engine.scheduler.step_cost import cache_windows

WEIGHTS = {"f32": 4.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""Bytes an element; scales of quantized weights and keys count nothing."""


@dataclass(frozen=True, slots=True)
class Precision:
    """In what the engine keeps and multiplies: "f32", "bf16", "int8", "fp8" or "int4".

    Attributes:
        weights: as they are stored.  linears: as they are multiplied.  kv: keys and values, as they are stored.
        scores, values: as queries are multiplied with keys, and weights with values.
        head: as it is stored and multiplied.
    """

    weights: str
    linears: str
    kv: str
    scores: str
    values: str
    head: str

    @classmethod
    def of(cls, config: EngineConfig, dtype: torch.dtype) -> Precision:
        """What these settings come to; raises `PeaksError` for a dtype that no peak is measured for."""
        names = {torch.float32: "f32", torch.bfloat16: "bf16"}
        if dtype not in names:
            raise PeaksError(f"no peak is measured for {dtype}; use bfloat16 or float32")
        plain = names[dtype]
        weights = plain if config.quantize in ("none", "dense") else config.quantize.removesuffix("-weight-only")
        linears = "int8" if config.quantize == "int8" else plain
        kv = plain if config.kv_dtype == "auto" else config.kv_dtype
        return cls(weights, linears, kv, kv, plain, plain)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's steps move and multiply.

    Attributes:
        layer_parameters: of all layers' linears.  head_parameters: of the head.
        last_parameters: of the last layer's, those that only positions with logits need.
        query_size, kv_size: heads and KV heads of one layer, times their dimension.
        group_layers: layers of each cache group.  last_group: the one of the last layer.
    """

    layer_parameters: int
    last_parameters: int
    head_parameters: int
    query_size: int
    kv_size: int
    group_layers: tuple[int, ...]
    last_group: int
    precision: Precision

    @classmethod
    def of(cls, decoder: DecoderSpec, precision: Precision) -> ModelCost:
        q, k, v = decoder.qkv_sizes
        layer = decoder.hidden_size * (q + k + v) + q * decoder.hidden_size
        layer += 3 * decoder.hidden_size * decoder.intermediate_size
        windows = cache_windows(decoder.windows)
        return cls(
            layer_parameters=decoder.num_layers * layer,
            last_parameters=layer - decoder.hidden_size * (k + v),
            head_parameters=decoder.vocab_size * decoder.hidden_size,
            query_size=q,
            kv_size=k,
            group_layers=tuple(decoder.windows.count(window) for window in windows),
            last_group=windows.index(decoder.windows[-1]),
            precision=precision,
        )

    def bytes_moved(self, step: StepRecord) -> float:
        """Bytes that a step reads or writes at least."""
        weights = self.layer_parameters * WEIGHTS[self.precision.weights]
        if step.logits_rows:
            weights += self.head_parameters * WEIGHTS[self.precision.head]
        tokens = sum(
            layers * (group.read_tokens + step.tokens)
            for layers, group in zip(self.group_layers, step.attention, strict=True)
        )
        return weights + 2 * self.kv_size * tokens * WEIGHTS[self.precision.kv]

    def operations(self, step: StepRecord) -> dict[str, float]:
        """Multiplications and additions of a step, by the dtype that they are done in."""
        precision = self.precision
        pairs = sum(layers * g.pairs for layers, g in zip(self.group_layers, step.attention, strict=True))
        last = step.attention[self.last_group]
        pairs -= last.pairs - last.logits_pairs
        parameters = self.layer_parameters * step.tokens - self.last_parameters * (step.tokens - step.logits_rows)
        done: dict[str, float] = {}
        for dtype, operations in (
            (precision.linears, 2.0 * parameters),
            (precision.head, 2.0 * self.head_parameters * step.logits_rows),
            (precision.scores, 2.0 * self.query_size * pairs),
            (precision.values, 2.0 * self.query_size * pairs),
        ):
            done[dtype] = done.get(dtype, 0.0) + operations
        return done

    def limits(self, step: StepRecord, peaks: MachinePeaks) -> tuple[float, float]:
        """Seconds that moving and multiplying take at least; the larger one is the step's limit."""
        moved = self.bytes_moved(step)
        work = self.operations(step)
        return moved / peaks.bandwidth(moved), sum(n / peaks.operations_per_second(t) for t, n in work.items())


@dataclass(frozen=True, slots=True)
class Roofline:
    """A run against its limit. Seconds, bytes and operations of all its steps.

    Attributes:
        limit_seconds: the sum of the steps' limits.  of them, bound_by_bytes and bound_by_operations: of the steps
            whose limit is that.
        measured_seconds: of the whole run.  step_seconds: of computing its steps (the rest is around them).
        share: limit over the whole run's time.
    """

    steps: int
    limit_seconds: float
    bound_by_bytes: float
    bound_by_operations: float
    measured_seconds: float
    step_seconds: float
    share: float
    bytes_moved: float
    operations: dict[str, float]


def roofline(steps: Iterable[StepRecord], cost: ModelCost, peaks: MachinePeaks, measured_seconds: float) -> Roofline:
    """Add up the steps' limits, and say what share of `measured_seconds` they are."""
    count, by_bytes, by_operations, moved, computing = 0, 0.0, 0.0, 0.0, 0.0
    operations: dict[str, float] = {}
    for step in steps:
        count += 1
        reading, multiplying = cost.limits(step, peaks)
        if reading >= multiplying:
            by_bytes += reading
        else:
            by_operations += multiplying
        moved += cost.bytes_moved(step)
        computing += step.ended - step.begun
        for dtype, number in cost.operations(step).items():
            operations[dtype] = operations.get(dtype, 0.0) + number
    limit = by_bytes + by_operations
    return Roofline(
        count, limit, by_bytes, by_operations, measured_seconds, computing, limit / measured_seconds, moved, operations
    )


def decoder_of(model: Path) -> DecoderSpec:
    """The shape of a model that the fused decoder computes; raises SystemExit for others, whose parts aren't known."""
    decoder: DecoderSpec | None
    if model.is_file():
        decoder = GGUFCheckpoint(model).decoder_spec()
    else:
        config = folder_config(model)
        family = fused_family(config)
        decoder = None if family is None else family(config)
    if decoder is None:
        raise SystemExit(f"error: {model} is computed by transformers' code; rooflines are for the fused decoder's")
    if decoder.experts is not None:
        raise SystemExit(f"error: {model} is a mixture of experts; what a step reads of it depends on its tokens")
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--set", default="", dest="overrides", help="engine settings: key:value,key:value")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=None, help="first N requests only")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    prompts = load_prompts(args.workload, args.model, args.limit)
    longest = max(len(p.token_ids) + p.max_tokens for p in prompts)
    config = EngineConfig(cache=CacheConfig(sequences=len(prompts), tokens_per_sequence=longest))
    try:
        config = with_overrides(config, parse_overrides(args.overrides))
        engine = Engine.load(args.model, config)
        threads = torch.get_num_threads()
        cost = ModelCost.of(decoder_of(args.model), Precision.of(config, engine.spec.dtype))
        before = measure(sorted({1, threads}))
        recorder = StepRecorder.attach(engine)
        run_once(engine, prompts, "warm-up")
        recorder.take()
        taken = [(run_once(engine, prompts, str(i)), recorder.take()) for i in range(args.runs)]
        after = measure(sorted({1, threads}))
    except (SettingError, PeaksError) as error:
        raise SystemExit(f"error: {error}") from error
    peaks = before[threads].best_with(after[threads])
    report: dict[str, Any] = {
        "workload": args.workload.name,
        "model": args.model.name,
        "settings": asdict(config),
        "machine": machine(),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "disturbed": disturbed(before) or disturbed(after),
        "peaks": asdict(peaks),
        "cost": asdict(cost),
        "recorder_seconds": recorder.overhead_seconds,
        "runs": [asdict(roofline(steps, cost, peaks, run["wall_seconds"])) | run for run, steps in taken],
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if report["disturbed"]:
        print("warning: other processes were running; the peaks are no limits", file=sys.stderr)
    for run in report["runs"]:
        print(
            f"limit {run['limit_seconds']:.2f} s ({run['bound_by_bytes']:.2f} bytes, "
            f"{run['bound_by_operations']:.2f} operations) of {run['measured_seconds']:.2f} s: {run['share']:.1%}"
        )


if __name__ == "__main__":
    main()
