"""What a model's weights cost in each form: tokens per second at several batch sizes, memory, perplexity.

    python benchmarks/small_models.py --model FILE [--setting NAME=key:value,… …] [--batch 1 …] [--json OUT]

All settings are loaded at once and take turns, round by round: a machine whose clock or memory drifts does so to all of
them. Figures are medians over rounds, ratios are taken within a round. A batch is so many prompts of 16 random tokens,
decoded greedily for some tokens each, end tokens ignored. Perplexity is of `perplexity.py`'s text, against the first
setting.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from engine_settings import SettingError, parse_named, with_overrides
from perplexity import compare, prose_windows, score
from throughput import machine

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids

SETTINGS = (
    "bf16=dtype:bfloat16,quantize:dense",
    "own form=dtype:bfloat16",
    "int8 weights=dtype:bfloat16,quantize:int8-weight-only",
    "int8 (W8A8)=dtype:bfloat16,quantize:int8",
)
_PROMPT = 16
_STEPS = {1: 64, 16: 48, 128: 24}
"""Tokens that each sequence of a batch gets."""


def decode(engine: Engine, batch: int, name: str) -> float:
    """Output tokens per second."""
    random = np.random.default_rng(batch)
    tokens = _STEPS.get(batch, 32)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = random.integers(100, engine.spec.vocab_size - 100, (batch, _PROMPT))
    requests = [Request(f"{name}-{i}", as_token_ids(ids.tolist()), params) for i, ids in enumerate(prompts)]
    begun = time.perf_counter()
    made = sum(len(done.choices[0].token_ids) for done in engine.run(requests))
    return made / (time.perf_counter() - begun)


def rates(engines: dict[str, Engine], batches: list[int], rounds: int) -> dict[str, Any]:
    """Setting -> batch -> tokens per second, and over the first setting's."""
    seconds: dict[str, dict[int, list[float]]] = {name: {batch: [] for batch in batches} for name in engines}
    for turn in range(-1, rounds):
        for batch in batches:
            for name, engine in engines.items():
                rate = decode(engine, batch, f"{turn}-{batch}")
                if turn >= 0:
                    seconds[name][batch].append(rate)
    first = seconds[next(iter(engines))]
    found: dict[str, Any] = {}
    for name, by_batch in seconds.items():
        found[name] = {}
        for batch, each in by_batch.items():
            ratios = [mine / theirs for mine, theirs in zip(each, first[batch], strict=True)]
            found[name][batch] = {
                "tokens_per_second": statistics.median(each), "least": min(each), "most": max(each),
                "of_first": statistics.median(ratios), "of_first_least": min(ratios), "of_first_most": max(ratios),
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--setting", action="append", default=[], help="NAME=key:value,…; the first is compared with")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=5, help="of speed; 0: none")
    parser.add_argument("--tokens", type=int, default=6144, help="of text for the perplexity; 0: none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    batches = args.batch or list(_STEPS)
    base = EngineConfig(
        threads=args.threads,
        cache=CacheConfig(sequences=max(batches), tokens_per_sequence=520, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=max(batches)),
    )
    try:
        named = dict(map(parse_named, args.setting or SETTINGS))
        engines = {name: Engine.load(args.model, with_overrides(base, changes)) for name, changes in named.items()}
    except SettingError as error:
        raise SystemExit(f"error: {error}") from error
    speed = rates(engines, batches, args.rounds) if args.rounds else {name: {} for name in engines}
    prompts = prose_windows(args.model, 512, args.tokens)
    scores = {name: score(engine, prompts) for name, engine in engines.items()} if prompts else {}
    results = []
    for name, engine in engines.items():
        entry: dict[str, Any] = {"name": name, "settings": asdict(engine.config), "weight_bytes": engine.weight_bytes}
        entry |= {"attention": engine.attention_name, "speed": speed[name]}
        if name in scores:
            entry["perplexity"] = math.exp(-float(scores[name].mean()))
            entry["against_first"] = asdict(compare(scores[name], scores[next(iter(engines))]))
        results.append(entry)
        said = ", ".join(
            f"{batch}: {s['tokens_per_second']:.1f} ({s['of_first']:.2f}; {s['of_first_least']:.2f} to "
            f"{s['of_first_most']:.2f})"
            for batch, s in speed[name].items()
        )
        quality = f", perplexity {entry['perplexity']:.3f}" if name in scores else ""
        print(f"{name}: {sum(engine.weight_bytes.values()) / 1e6:.1f} MB, tokens/s {said}{quality}", flush=True)
    if args.json:
        size = args.model.stat().st_size if args.model.is_file() else None
        report = {
            "model": args.model.name, "file_bytes": size, "rounds": args.rounds, "prompt_tokens": _PROMPT,
            "steps": {str(batch): _STEPS.get(batch, 32) for batch in batches}, "scored_tokens": len(prompts) * 511,
            "machine": machine(), "results": results,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
