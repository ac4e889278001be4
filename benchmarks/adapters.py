"""Throughput with many LoRA adapters over one model, against the model alone: the same rows, in alternation.

    python benchmarks/adapters.py [--model demo] [--adapters 16] [--rank 16] [--rows 128] [--rounds 3] [--max-loras 8]

Rows name adapters in turn ("shuffled") or all of one before the next ("sorted"); "base": no row has one, in the same
engine; "one": all rows have the same one. The adapters are random, so that answers are too: each has `--max-tokens`
tokens. Seconds are those of the process on its one thread (`--threads 1`), which other work on the machine disturbs
less than the clock's. Each work is done once before it is measured, so that adapters are in memory (`adapter_loads`
counts the files read meanwhile).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
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
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def measure(engine: Engine, names: list[str | None], prompt_tokens: int, max_tokens: int, salt: bytes) -> float:
    """Return the output tokens of these rows per second of processor time."""
    random = np.random.default_rng(1)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = [random.integers(5, 2000, prompt_tokens).tolist() for _ in names]
    requests = [
        Request(str(i), as_token_ids(prompt), params, adapter=name, salt=salt)
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    begun = time.process_time()
    tokens = sum(completion.generated_tokens for completion in engine.run(requests))
    return tokens / (time.process_time() - begun)


def main() -> None:
    """Measure and print a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    for name, value in (
        ("adapters", 16), ("rank", 16), ("rows", 128), ("rounds", 3), ("max-loras", 8), ("batch", 32),
        ("prompt-tokens", 128), ("max-tokens", 64), ("threads", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    source = find(args.model, CACHE)
    assert source is not None, f"fetch the model first: tokenmill models pull {args.model}"
    path = source.path
    decoder = open_model(path).decoder
    assert decoder is not None, "adapters need a model that the engine has code for"
    with tempfile.TemporaryDirectory() as folder:
        names = [f"a{i}" for i in range(args.adapters)]
        for i, name in enumerate(names):
            make_adapter(decoder, Path(folder) / name, i, args.rank)
        schedule = ScheduleConfig(max_num_seqs=args.batch)
        config = EngineConfig(dtype=args.dtype, threads=args.threads, schedule=schedule, max_model_len=1024)
        alone = Engine.load(path, config)
        lora = LoraConfig(tuple((name, str(Path(folder) / name)) for name in names), args.max_loras)
        engine = Engine.load(path, replace(config, lora=lora))
        turns = [names[i % len(names)] for i in range(args.rows)]
        works: dict[str, tuple[Engine, list[str | None]]] = {
            "without adapters": (alone, [None] * args.rows),
            "base": (engine, [None] * args.rows),
            "one": (engine, [names[0]] * args.rows),
            "sorted": (engine, sorted(turns)),
            "shuffled": (engine, list(turns)),
        }
        rates: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(args.rounds + 1):
            for name, (of, rows) in works.items():
                rate = measure(of, rows, args.prompt_tokens, args.max_tokens, b"%d" % turn + name.encode())
                if turn:  # the first one warms up
                    rates[name].append(round(rate, 1))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    whole = medians["without adapters"]
    found = {
        "settings": vars(args),
        "attention": engine.attention_name,
        "adapter_loads": engine.stats().adapter_loads,
        "output_tokens_per_second": rates,
        "share_of_the_model_alone": {name: round(median / whole, 3) for name, median in medians.items()},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
