"""A mixture of experts through this engine's kernels and through transformers' code, and how near the roofline it is.

    python benchmarks/experts.py [--dtype bfloat16 …] [--quantize int4 …] [--batch 1 …] [--set key:value,…]
                                 [--rounds 5] [--json OUT]

The model is random (Qwen3-MoE; its shape is by options) and made anew: nothing is said of quality, and a trained router
may choose less evenly. Both ways are loaded at once and take turns, round by round; a batch is so many prompts of 16
random tokens, decoded greedily, end tokens ignored. Only the kernels' weights are quantized: transformers' experts
can't be. Rates are of decoding steps (those that compute one token a row) and the time in them; figures are medians
over rounds, ratios are taken within a round.

The limit of a step is that of `roofline.py`, where of the experts those that a token of the step chose are read once,
and the router always. Steps choose different experts, so the bandwidth is that of memory as large as all weights that
the steps of a round read together: one step's alone would fit a cache in which they are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from engine_settings import SettingError, parse_overrides, with_overrides
from machine_peaks import MachinePeaks, PeaksError, disturbed, measure
from numpy.typing import NDArray
from roofline import WEIGHTS, ModelCost, Precision
from step_record import StepRecord, StepRecorder
from throughput import machine
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.config import Quantize
from engine.models.decoder import DecoderSpec
from engine.models.load import open_model
from engine.models.native import NativeDecoder
from engine.plan import StepOutput, StepPlan

WAYS = {"kernels": True, "transformers": False}
"""Way -> the engine's own model code."""

SHAPE = ("layers", "hidden", "experts", "top_k", "intermediate", "vocabulary")
"""The options that say the model's."""


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """A step's experts.

    Attributes:
        chosen: bool [layers, experts], by a token.  rows: pairs of a token and an expert.
    """

    chosen: NDArray[np.bool_]
    rows: int

    @property
    def touched(self) -> int:
        """Experts that a token chose, over all layers."""
        return int(self.chosen.sum())


class ExpertRecorder(StepRecorder):
    """A `StepRecorder` that also reads the kernels' counts of rows by expert, where they compute."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        model = self._inner._model
        self._model = model if isinstance(model, NativeDecoder) else None
        self._uses: list[ExpertUse] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        if self._model:
            self._model.reset_expert_load()
        output = super().execute(plan)
        if self._model:
            load = self._model.expert_load()
            assert load is not None
            rows = load.rows
            self._uses.append(ExpertUse(rows > 0, int(rows.sum())))
        return output

    def decodes(self) -> list[tuple[StepRecord, ExpertUse | None]]:
        """The decoding steps since the last call."""
        uses, self._uses = self._uses, []
        steps = self.take()
        pairs = zip(steps, uses or [None] * len(steps), strict=True)
        return [(step, use) for step, use in pairs if step.tokens == step.rows]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoding steps. `rate`: tokens per second of `seconds` in them."""

    rate: float
    seconds: float
    steps: list[tuple[StepRecord, ExpertUse | None]]


def decode(engine: Engine, recorder: ExpertRecorder, batch: int, tokens: int, name: str) -> Decoded:
    """Decode a batch, after its prompts."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(batch).integers(1, engine.spec.vocab_size, (batch, 16))
    requests = [Request(f"{name}-{i}", as_token_ids(ids.tolist()), params) for i, ids in enumerate(prompts)]
    for _ in engine.run(requests):
        pass
    steps = recorder.decodes()
    seconds = sum(step.ended - step.begun for step, _ in steps)
    return Decoded(sum(step.tokens for step, _ in steps) / seconds, seconds, steps)


def make_model(folder: Path, args: argparse.Namespace) -> None:
    config = Qwen3MoeConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 128), head_dim=64,
        intermediate_size=4 * args.hidden, moe_intermediate_size=args.intermediate, num_experts=args.experts,
        num_experts_per_tok=args.top_k, norm_topk_prob=True, max_position_embeddings=1024, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def bytes_moved(step: StepRecord, touched: int, cost: ModelCost, expert: int, router: int) -> float:
    """Bytes that a step reads or writes at least. `cost`: of the model without its experts. `expert`, `router`:
    parameters."""
    return cost.bytes_moved(step) + touched * expert * WEIGHTS[cost.precision.weights] + router * WEIGHTS["f32"]


def limit_seconds(
    step: StepRecord, use: ExpertUse, cost: ModelCost, expert: int, router: int, peaks: MachinePeaks, memory: float
) -> float:
    """Seconds that a step takes at least, with weights that are read from so many bytes of memory. The others: as of
    `bytes_moved`."""
    moved = bytes_moved(step, use.touched, cost, expert, router)
    work = cost.operations(step)
    work[cost.precision.linears] = work.get(cost.precision.linears, 0.0) + 2.0 * expert * use.rows
    multiplying = sum(n / peaks.operations_per_second(dtype) for dtype, n in work.items())
    return max(moved / peaks.bandwidth(memory), multiplying)


def share(decoded: Decoded, spec: DecoderSpec, precision: Precision, peaks: MachinePeaks) -> float:
    """Roofline over time."""
    assert spec.experts is not None
    cost = ModelCost.of(replace(spec, intermediate_size=0, experts=None), precision)
    expert = 3 * spec.hidden_size * spec.experts.intermediate_size
    router = spec.num_layers * spec.experts.num_experts * spec.hidden_size
    steps = [(step, use) for step, use in decoded.steps if use is not None]
    chosen = np.logical_or.reduce([use.chosen for _, use in steps])
    memory = bytes_moved(steps[-1][0], int(chosen.sum()), cost, expert, router)
    limits = [limit_seconds(step, use, cost, expert, router, peaks, memory) for step, use in steps]
    return sum(limits) / decoded.seconds


def measured(
    model: Path, dtype: str, quantize: Quantize, args: argparse.Namespace, peaks: MachinePeaks
) -> dict[str, Any]:
    """Both ways in turn, batch by batch. `quantize`: the kernels' weights."""
    base = EngineConfig(
        dtype=dtype,
        quantize=quantize,
        threads=args.threads,
        cache=CacheConfig(sequences=max(args.batch), tokens_per_sequence=128, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=max(args.batch)),
    )
    base = with_overrides(base, parse_overrides(args.set))
    engines = {
        way: Engine.load(model, replace(base, own_models=own, quantize=base.quantize if own else "none"))
        for way, own in WAYS.items()
    }
    recorders = {way: ExpertRecorder.attach(engine) for way, engine in engines.items()}
    found: dict[int, list[dict[str, Decoded]]] = {batch: [] for batch in args.batch}
    for turn in range(-1, args.rounds):
        for batch in args.batch:
            both = {
                way: decode(engine, recorders[way], batch, args.tokens, f"{turn}-{batch}")
                for way, engine in engines.items()
            }
            if turn >= 0:
                found[batch].append(both)
    kernels = engines["kernels"]
    precision, spec = Precision.of(base, kernels.spec.dtype), open_model(model).decoder
    assert spec is not None
    report: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "settings": asdict(base), "batches": {}}
    for batch, rounds in found.items():
        ratios = [both["kernels"].rate / both["transformers"].rate for both in rounds]
        shares = [share(both["kernels"], spec, precision, peaks) for both in rounds]
        uses = [use for both in rounds for _, use in both["kernels"].steps if use is not None]
        report["batches"][batch] = {
            "tokens_per_second": {way: statistics.median(both[way].rate for both in rounds) for way in WAYS},
            "rates": {way: [both[way].rate for both in rounds] for way in WAYS},
            "ratio": statistics.median(ratios), "ratios": ratios,
            "roofline": statistics.median(shares), "rooflines": shares,
            "touched_experts_a_layer": sum(use.touched for use in uses) / max(1, len(uses)) / kernels.spec.num_layers,
        }  # fmt: skip
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", action="append", default=[], help="bfloat16, float32")
    parser.add_argument(
        "--quantize", action="append", default=[], choices=get_args(Quantize), help="the kernels' weights"
    )
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--set", default="", help="engine settings: key:value,key:value")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512, help="of an expert")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=16, help="of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    args.batch = args.batch or [1, 16, 64]
    results = []
    try:
        before = measure(sorted({1, args.threads}))
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder)
            make_model(model, args)
            for dtype, quantize in product(args.dtype or ["bfloat16", "float32"], args.quantize or ["none"]):
                results.append(measured(model, dtype, quantize, args, before[args.threads]))
                for batch, found in results[-1]["batches"].items():
                    said = ", ".join(f"{way} {rate:.1f}" for way, rate in found["tokens_per_second"].items())
                    ratios, shares = found["ratios"], found["rooflines"]
                    print(
                        f"{dtype}, quantize {quantize}, batch {batch}: tokens/s {said} ({found['ratio']:.2f}; "
                        f"{min(ratios):.2f} to {max(ratios):.2f}), {found['roofline']:.0%} of the roofline "
                        f"({min(shares):.0%} to {max(shares):.0%})",
                        flush=True,
                    )
        after = measure(sorted({1, args.threads}))
    except (SettingError, PeaksError) as error:
        raise SystemExit(f"error: {error}") from error
    if moved := disturbed(before) or disturbed(after):
        print("warning: other processes were running; the peaks are no limits", file=sys.stderr)
    if args.json:
        report = {
            "machine": machine(), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "disturbed": moved,
            "model": {name: getattr(args, name) for name in SHAPE},
            "peaks": asdict(before[args.threads]), "results": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
