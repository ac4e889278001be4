"""A mixture of experts through this engine's kernels and through transformers' code, and how near the roofline it is.

    python benchmarks/experts.py [--dtype bfloat16 …] [--batch 1 …] [--set key:value,…] [--rounds 5] [--json OUT]

The model is random (Qwen3-MoE; its shape is by options) and made anew: nothing is said of quality, and a trained router
may choose less evenly. Both ways are loaded at once and take turns, round by round; a batch is so many prompts of 16
random tokens, decoded greedily, end tokens ignored. Figures are medians over rounds, ratios are taken within a round.

The limit of a step is that of `roofline.py`, where of the experts those that a token of the step chose are read once,
and the router always. Shares are of the time in steps, and of decoding steps only (those that compute one token a row).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from engine_settings import SettingError, parse_overrides, with_overrides
from machine_peaks import MachinePeaks, PeaksError, disturbed, measure
from roofline import WEIGHTS, ModelCost, Precision, decoder_of
from small_models import decode
from step_record import StepRecord, StepRecorder
from throughput import machine
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine import CacheConfig, Engine, EngineConfig, ScheduleConfig
from engine.models.native import NativeDecoder
from engine.plan import StepOutput, StepPlan

WAYS = {"kernels": True, "transformers": False}
"""Way -> the engine's own model code."""

SHAPE = ("layers", "hidden", "experts", "top_k", "intermediate", "vocabulary")
"""The options that say the model's."""


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """One step.

    Attributes:
        touched: experts that a token chose, over all layers.  rows: pairs of a token and an expert.
    """

    step: StepRecord
    touched: int
    rows: int


class ExpertRecorder(StepRecorder):
    """A `StepRecorder` that also reads the kernels' counts of rows by expert."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        model = self._inner._model
        assert isinstance(model, NativeDecoder), "these experts do not run in the kernels"
        self._model = model
        self.experts: list[tuple[int, int]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        before = self._model.expert_rows()
        output = super().execute(plan)
        rows = self._model.expert_rows() - before
        self.experts.append((int((rows > 0).sum()), int(rows.sum())))
        return output

    def records(self) -> list[ExpertRecord]:
        """The steps since the last call."""
        experts, self.experts = self.experts, []
        return [ExpertRecord(step, *found) for step, found in zip(self.take(), experts, strict=True)]


def make_model(folder: Path, args: argparse.Namespace) -> None:
    config = Qwen3MoeConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 128), head_dim=64,
        intermediate_size=4 * args.hidden, moe_intermediate_size=args.intermediate, num_experts=args.experts,
        num_experts_per_tok=args.top_k, norm_topk_prob=True, max_position_embeddings=1024, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def limit_seconds(record: ExpertRecord, cost: ModelCost, expert: int, router: int, peaks: MachinePeaks) -> float:
    """Seconds that a step takes at least. `cost`: of the model without its experts. `expert`, `router`: parameters."""
    moved = cost.bytes_moved(record.step)
    moved += record.touched * expert * WEIGHTS[cost.precision.weights] + router * WEIGHTS["f32"]
    work = cost.operations(record.step)
    work[cost.precision.linears] = work.get(cost.precision.linears, 0.0) + 2.0 * expert * record.rows
    multiplying = sum(n / peaks.operations_per_second(dtype) for dtype, n in work.items())
    return max(moved / peaks.bandwidth(moved), multiplying)


def shares(
    records: list[ExpertRecord], model: Path, config: EngineConfig, dtype: torch.dtype, peaks: MachinePeaks
) -> dict[str, float]:
    """Roofline over time, of all steps and of decoding ones."""
    spec = decoder_of(model)
    assert spec.experts is not None
    cost = ModelCost.of(replace(spec, intermediate_size=0, experts=None), Precision.of(config, dtype))
    expert = 3 * spec.hidden_size * spec.experts.intermediate_size
    router = spec.num_layers * spec.experts.num_experts * spec.hidden_size
    found = {}
    decodes = [record for record in records if record.step.tokens == record.step.rows]
    for name, some in (("all", records), ("decode", decodes)):
        limit = sum(limit_seconds(record, cost, expert, router, peaks) for record in some)
        found[name] = limit / sum(record.step.ended - record.step.begun for record in some)
    found["touched"] = sum(record.touched for record in decodes) / max(1, len(decodes)) / spec.num_layers
    return found


def measured(model: Path, dtype: str, args: argparse.Namespace, peaks: dict[int, MachinePeaks]) -> dict[str, Any]:
    """Both ways in turn, batch by batch; then the kernels' steps beside their limits."""
    base = EngineConfig(
        dtype=dtype,
        threads=args.threads,
        own_models=True,
        cache=CacheConfig(sequences=max(args.batch), tokens_per_sequence=128, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=max(args.batch)),
    )
    base = with_overrides(base, parse_overrides(args.set))
    engines = {way: Engine.load(model, replace(base, own_models=own)) for way, own in WAYS.items()}
    report: dict[str, Any] = {"dtype": dtype, "settings": asdict(base)}
    rates: dict[int, dict[str, list[float]]] = {batch: {way: [] for way in WAYS} for batch in args.batch}
    for turn in range(-1, args.rounds):
        for batch in args.batch:
            for way, engine in engines.items():
                rate = decode(engine, batch, f"{turn}-{batch}")
                if turn >= 0:
                    rates[batch][way].append(rate)
    for batch, by_way in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(*by_way.values(), strict=True)]
        report[str(batch)] = {
            "tokens_per_second": {way: statistics.median(each) for way, each in by_way.items()}, "rates": by_way,
            "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios),
        }  # fmt: skip
    engine = engines["kernels"]
    recorder = ExpertRecorder.attach(engine)
    for batch in args.batch:
        decode(engine, batch, f"recorded-{batch}")
        found = shares(recorder.records(), model, base, engine.spec.dtype, peaks[args.threads])
        report[str(batch)]["roofline"] = found
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", action="append", default=[], help="bfloat16, float32")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--set", default="", help="engine settings: key:value,key:value")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512, help="of an expert")
    parser.add_argument("--vocabulary", type=int, default=8192)
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
            for dtype in args.dtype or ["bfloat16", "float32"]:
                results.append(measured(model, dtype, args, before))
                for batch in args.batch:
                    found = results[-1][str(batch)]
                    said = ", ".join(f"{way} {rate:.1f}" for way, rate in found["tokens_per_second"].items())
                    print(
                        f"{dtype}, batch {batch}: tokens/s {said} ({found['ratio']:.2f}; {found['ratio_least']:.2f} to "
                        f"{found['ratio_most']:.2f}), {found['roofline']['decode']:.0%} of the roofline",
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
