"""Perplexity of a model under several engine settings, on the same real text, in one run.

    python benchmarks/perplexity.py --model MODEL --setting bf16=dtype:bfloat16 --setting int8=quantize:int8

The text (two PEPs, `workloads/prose.txt`, checked by its sha256) is cut into windows of so many tokens, each behind
what the tokenizer puts before every text (models that were trained with it are lost without). The engine scores each as
a prompt (`prompt_logprobs`), all but its first token. float32 with the reference attention is always measured first;
every setting is compared with it, and with the setting called bf16 if there is one. The difference comes with its
standard error over windows: the same tokens are scored each time, so it is far smaller than that of a perplexity.
Prompts are computed in chunks: `schedule.max_chunk_tokens:1` in a setting has every token computed as an answer's are,
one a row and step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from engine_settings import SettingError, parse_named, with_overrides
from numpy.typing import NDArray
from throughput import machine

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from workers.text.tokenizer import Tokenizer

PROSE = Path(__file__).parent / "workloads" / "prose.txt"
PROSE_SHA256 = "e18a1145d8a9c343ab8c29d548c2e903bbe0d8512b779cb7114812a8cb1cd716"
REFERENCE = ("float32", {"dtype": "float32", "attention": "reference"})
BASELINE = "bf16"


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one setting from another. Shares: 0.01 is one per cent more perplexity.

    Attributes:
        relative: perplexity over the other's, minus one.  standard_error: of it.
        largest_token: the largest difference of a token's log-probability.
    """

    relative: float
    standard_error: float
    largest_token: float


def windows(ids: Sequence[int], size: int, tokens: int, start: Sequence[int] = ()) -> list[list[int]]:
    """The first `tokens` ids in windows of `size`, each with `start` for its first ids; what doesn't fill a window is
    left out."""
    size -= len(start)
    count = min(len(ids), tokens) // size
    return [[*start, *ids[at * size : (at + 1) * size]] for at in range(count)]


def prose_windows(model: Path, size: int, tokens: int) -> list[list[int]]:
    """Windows of the prose as the model's tokenizer has it; each begins with what that puts before every text."""
    text = PROSE.read_text(encoding="utf-8")
    if hashlib.sha256(text.encode()).hexdigest() != PROSE_SHA256:
        raise SystemExit(f"error: {PROSE} is not the text of the other measurements; restore it")
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()
    start = tokenizer.encode_batch([""], add_special_tokens=True)[0].tolist()
    return windows(ids, size, tokens, start)


def score(engine: Engine, prompts: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """float64 [windows, size - 1]: the log-probability of each token but a window's first, given those before it.

    Raises:
        RuntimeError: the engine could not score a window.
    """
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    found: dict[int, NDArray[np.float64]] = {}
    for done in engine.run(Request(str(i), as_token_ids(ids), params) for i, ids in enumerate(prompts)):
        if done.prompt_logprobs is None or not np.isfinite(done.prompt_logprobs.chosen[1:]).all():
            raise RuntimeError(f"window {done.request_id} was not scored: {done.error}")
        found[int(done.request_id)] = done.prompt_logprobs.chosen[1:].astype(np.float64)
    return np.stack([found[i] for i in range(len(prompts))])


def compare(scores: NDArray[np.float64], other: NDArray[np.float64]) -> Difference:
    """How much more perplexity `scores` have than `other` (both [windows, tokens]); the error is taken over windows."""
    change = other - scores
    by_window = change.mean(axis=1)
    mean = float(by_window.mean())
    error = float(by_window.std(ddof=1)) / math.sqrt(len(by_window)) if len(by_window) > 1 else math.nan
    return Difference(math.expm1(mean), math.exp(mean) * error, float(np.abs(change).max()))


def measure(
    model: Path, named: Sequence[tuple[str, dict[str, Any]]], prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Perplexity under each setting, in order; each with its difference from the first and from the one called bf16."""
    found: list[dict[str, Any]] = []
    scores: dict[str, NDArray[np.float64]] = {}
    size = len(prompts[0])
    base = EngineConfig(
        cache=CacheConfig(sequences=len(prompts), tokens_per_sequence=size, prefix_caching=False),
        schedule=ScheduleConfig(max_num_seqs=min(32, len(prompts))),
    )
    for name, overrides in named:
        engine = Engine.load(model, with_overrides(base, overrides))
        begun = time.perf_counter()
        scores[name] = score(engine, prompts)
        against = {other: scores[other] for other in (named[0][0], BASELINE) if other in scores and other != name}
        differences = {other: asdict(compare(scores[name], theirs)) for other, theirs in against.items()}
        entry: dict[str, Any] = {
            "name": name,
            "settings": asdict(engine.config),
            "perplexity": math.exp(-float(scores[name].mean())),
            "seconds": time.perf_counter() - begun,
            "against": differences,
        }
        found.append(entry)
        del engine  # before the next one is loaded beside it
        said = ", ".join(
            f"{d['relative']:+.3%} ± {d['standard_error']:.3%} of {o}" for o, d in entry["against"].items()
        )
        print(f"{name}: {entry['perplexity']:.4f} {said} ({entry['seconds']:.0f} s)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--setting", action="append", default=[], help="NAME=key:value,key:value; may be repeated")
    parser.add_argument("--tokens", type=int, default=8192, help="how many of the text's tokens")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    prompts = prose_windows(args.model, args.window, args.tokens)
    if not prompts:
        raise SystemExit(f"error: {args.tokens} tokens, or the whole text, don't fill a window of {args.window}")
    try:
        named = [REFERENCE, *(parse_named(text) for text in args.setting or ["bf16=dtype:bfloat16"])]
        if len({name for name, _ in named}) < len(named):
            raise SettingError(f"two settings have one name, or the name {REFERENCE[0]}, which is taken")
        named = [(name, {"threads": args.threads, **overrides}) for name, overrides in named]
        settings = measure(args.model, named, prompts)
    except SettingError as error:
        raise SystemExit(f"error: {error}") from error
    report = {
        "model": args.model.name,
        "text": {"file": PROSE.name, "sha256": PROSE_SHA256},
        "windows": len(prompts),
        "window_tokens": args.window,
        "scored_tokens": len(prompts) * (args.window - 1),
        "machine": machine(),
        "settings": settings,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
