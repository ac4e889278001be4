"""Offline throughput of the engine on a workload file: all requests at once, greedy, end tokens ignored.

    python benchmarks/throughput.py benchmarks/workloads/mixed.jsonl --model MODEL [--runs 3] [--json FILE]

Prints a line a run and writes JSON with machine, versions, settings and every run. `--null` replaces the model by one
that answers at once, which leaves the scheduler and the bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from workload import Prompt, load_prompts, write_prompts

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.models.load import describe_model


def machine() -> dict[str, Any]:
    """What ran this: CPU name, cores, memory, and versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "").split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "features": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
    }


def run_once(
    engine: Engine, prompts: list[Prompt], name: str, lengths: list[list[int]] | None = None
) -> dict[str, float]:
    """One timed pass over the workload; a salt of its own hides the prefixes that earlier passes left.

    How many tokens each request got, in order, is added to `lengths`, if given.
    """
    before = engine.stats()
    begun = time.perf_counter()
    requests = [
        Request(
            f"{name}-{i}",
            as_token_ids(prompt.token_ids),
            SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True),
            salt=name.encode(),
            readers_known=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    made = {completion.request_id: len(completion.choices[0].token_ids) for completion in engine.run(requests)}
    wall = time.perf_counter() - begun
    if lengths is not None:
        lengths.append([made[request.request_id] for request in requests])
    output = sum(made.values())
    after = engine.stats()
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return {
        "wall_seconds": wall,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output,
        "cached_tokens": after.cached - before.cached,
        "steps": after.steps - before.steps,
        "output_tokens_per_second": output / wall,
        "total_tokens_per_second": (output + prompt_tokens) / wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="OpenAI batch lines, or token ids (.json) kept by --keep-prompts")
    parser.add_argument("--model", required=True, help="a folder or a GGUF file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--limit", type=int, default=None, help="first N requests only")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--null", action="store_true", help="no model: scheduler and bookkeeping alone")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--keep-prompts", type=Path, default=None, help="write the token ids here, for other engines")
    parser.add_argument("--keep-lengths", type=Path, default=None, help="write each run's lengths of answers here")
    args = parser.parse_args()

    prompts = load_prompts(args.workload, Path(args.model), args.limit)
    if args.keep_prompts:
        write_prompts(args.keep_prompts, prompts)
    config = EngineConfig(
        dtype=args.dtype,
        threads=args.threads,
        attention=args.attention,
        instruction_set=args.instruction_set,
        quantize=args.quantize,
        kv_dtype=args.kv_dtype,
        cache=CacheConfig(
            block_size=args.block_size,
            prefix_caching=not args.no_prefix_caching,
            sequences=len(prompts),
            tokens_per_sequence=max(len(p.token_ids) + p.max_tokens for p in prompts),
        ),
        schedule=ScheduleConfig(args.max_num_seqs, args.max_num_batched_tokens),
    )
    begun = time.perf_counter()
    if args.null:
        config = replace(config, cache=replace(config.cache, num_blocks=8192))
        engine = Engine.without_model(describe_model(args.model).spec, config, num_blocks=8192)
    else:
        engine = Engine.load(args.model, config)
    loaded = time.perf_counter() - begun
    runs = []
    lengths: list[list[int]] = []
    for i in range(args.warmup + args.runs):
        result = run_once(engine, prompts, str(i), lengths)
        print(
            f"{'warm-up' if i < args.warmup else 'run'} {i}: {result['wall_seconds']:.2f} s, "
            f"{result['output_tokens_per_second']:.1f} output tok/s, "
            f"{result['total_tokens_per_second']:.1f} total tok/s, {result['cached_tokens']} cached",
            file=sys.stderr,
            flush=True,
        )
        if i >= args.warmup:
            runs.append(result)
    if args.keep_lengths:
        args.keep_lengths.write_text(json.dumps(lengths[args.warmup :]), encoding="utf-8")
    rates = [run["output_tokens_per_second"] for run in runs]
    report = {
        "workload": args.workload.name,
        "engine": "tokenmill" + (" (null runner)" if args.null else ""),
        "output_tokens_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "load_seconds": loaded,
        "model": Path(args.model).name,
        "dtype": str(engine.spec.dtype).removeprefix("torch."),
        "settings": asdict(config),
        "machine": machine(),
        "runs": runs,
    }
    text = json.dumps(report, indent=2)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({key: report[key] for key in ("workload", "engine", "output_tokens_per_second")}))


if __name__ == "__main__":
    main()
