"""Throughput with many LoRA adapters over one model, against the model alone: the same rows, step by step in turn.

    python benchmarks/adapters.py [--model demo] [--adapters 16] [--rank 16] [--rows 512] [--rounds 3] [--max-loras 8]

Rows name adapters in turn ("shuffled") or all of one before the next ("sorted", the planner's order); "base": no row
has one, in an engine that has them; "one": all rows have the same one. The adapters are random, so that answers are
too: each has `--max-tokens` tokens. Each work has an engine of its own, and their steps alternate, so that what else
the machine does meets all of them alike. Seconds are those of the process on its one thread (`--threads 1`). A first,
short round is not measured, so that adapters are in memory (`adapter_loads` counts the files that the sorted rows'
engine reads). "merged": all rows have the only adapter, which was added to the weights when they were loaded. Those
must be dense, so its share is of "dense": the model alone with its weights dequantized.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from engine import Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.adapters.targets import find_targets
from engine.config import LoraConfig
from engine.models.decoder import DecoderSpec
from engine.models.load import open_model
from tokenmill.models.sources import find

CACHE = Path.home() / ".cache/tokenmill/models"


def make_adapter(decoder: DecoderSpec, folder: Path, seed: int, rank: int) -> None:
    """Save a random adapter of all attention and MLP projections."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in find_targets(decoder).items():
        if not name.endswith("out_proj") and ".feed_forward." not in name:
            for matrix, shape in (("A", (rank, target.columns)), ("B", (target.rows, rank))):
                values = torch.randn(shape, generator=random) * 0.02
                tensors[f"base_model.model.model.{name}.lora_{matrix}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def prompts(rows: int, tokens: int) -> list[list[int]]:
    """Random prompts, always the same."""
    random = np.random.default_rng(1)
    found: list[list[int]] = [random.integers(5, 2000, tokens).tolist() for _ in range(rows)]
    return found


def add(engine: Engine, names: Sequence[str | None], prompt_tokens: int, max_tokens: int, salt: bytes) -> None:
    """Queue a request for each name: equal prompts in equal places, whatever the engine and the names."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i, (name, prompt) in enumerate(zip(names, prompts(len(names), prompt_tokens), strict=True)):
        engine.add(Request(str(i), as_token_ids(prompt), params, adapter=name, salt=salt))
    engine.settle(more_to_come=False)


def run_in_turn(engines: Mapping[str, Engine]) -> dict[str, float]:
    """Compute the engines' requests, a step of each at a time; return each one's seconds of processor time."""
    seconds = dict.fromkeys(engines, 0.0)
    while left := [name for name, engine in engines.items() if engine.has_work]:
        for name in left:
            begun = time.process_time()
            engines[name].step()
            seconds[name] += time.process_time() - begun
    return seconds


def main() -> None:
    """Measure and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    for name, value in (
        ("adapters", 16), ("rank", 16), ("rows", 512), ("rounds", 3), ("max-loras", 8), ("batch", 32),
        ("prompt-tokens", 32), ("max-tokens", 16), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--keep", type=Path, help="save adapters and shuffled rows here, for peers/vllm_adapters.py")
    args = parser.parse_args()
    source = find(args.model, CACHE)
    assert source is not None, f"fetch the model first: tokenmill models pull {args.model}"
    path = source.path
    decoder = open_model(path).decoder
    assert decoder is not None, "adapters need a model that the engine has code for"
    with tempfile.TemporaryDirectory() if args.keep is None else nullcontext(args.keep) as folder:
        names = [f"a{i}" for i in range(args.adapters)]
        for i, name in enumerate(names):
            make_adapter(decoder, Path(folder) / name, i, args.rank)
        schedule = ScheduleConfig(max_num_seqs=args.batch)
        config = EngineConfig(dtype=args.dtype, threads=args.threads, schedule=schedule, max_model_len=1024)
        lora = LoraConfig(tuple((name, str(Path(folder) / name)) for name in names), args.max_loras)
        turns = [names[i % len(names)] for i in range(args.rows)]
        if args.keep is not None:
            kept = zip(turns, prompts(args.rows, args.prompt_tokens), strict=True)
            lines = [{"adapter": name, "token_ids": ids, "max_tokens": args.max_tokens} for name, ids in kept]
            (args.keep / "rows.json").write_text(json.dumps(lines), encoding="utf-8")
        works: dict[str, Sequence[str | None]] = {
            "without adapters": [None] * args.rows,
            "base": [None] * args.rows,
            "one": [names[0]] * args.rows,
            "sorted": sorted(turns),
            "shuffled": turns,
            "dense": [None] * args.rows,
            "merged": [None] * args.rows,
        }
        dense = replace(config, quantize="dense")
        only = replace(lora, adapters=lora.adapters[:1], merge=True)
        alone = {"without adapters": config, "dense": dense, "merged": replace(dense, lora=only)}
        engines = {name: Engine.load(path, alone.get(name, replace(config, lora=lora))) for name in works}
        rates: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(args.rounds + 1):
            for name, rows in works.items():
                once = [*dict.fromkeys(rows)]
                add(engines[name], rows if turn else once, args.prompt_tokens, args.max_tokens, b"%d" % turn)
            seconds = run_in_turn(engines)
            for name in works if turn else ():
                rates[name].append(round(args.rows * args.max_tokens / seconds[name], 1))
    whole = dict.fromkeys(works, rates["without adapters"]) | dict.fromkeys(("dense", "merged"), rates["dense"])
    found = {
        "settings": vars(args),
        "attention": engines["sorted"].attention_name,
        "adapter_loads": engines["sorted"].stats().adapter_loads,
        "output_tokens_per_second": rates,
        "share_of_the_model_alone": {
            name: round(statistics.median(one / alone for one, alone in zip(found, whole[name], strict=True)), 3)
            for name, found in rates.items()
        },
    }
    print(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
