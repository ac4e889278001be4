"""Are the engine's answers transformers' answers? Real models, loaded by both from the same GGUF file.

    python benchmarks/exactness.py --model FILE.gguf --workload benchmarks/workloads/mixed.jsonl [--json OUT.json]

At float32 greedy tokens must be equal, for each setting of a pairwise covering array (batch, chunk and block size,
prefix cache), the extremes, and a pool so small that sequences are preempted. Where transformers' two best logits are
closer than 1e-4 either token is right: the comparison stops there and is counted. At bfloat16 each side's token at the
first difference must be among the other's five likeliest. Exits with 1 at the first violation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from throughput import machine
from transformers import AutoModelForCausalLM
from workload import read_workload

from engine import Engine, Request, SamplingParams, as_token_ids
from schemas.requests.parsing import ChatMessage
from tests.engine.oracle import (
    Answer,
    Setting,
    check_equal,
    covering_settings,
    engine_answers,
    greedy_answer,
    tokens_of,
)
from workers.text.tokenizer import Tokenizer

LONG_PROMPT = 700
"""Tokens that a raw prompt is stretched to, every fifth one: beyond a sliding window of 512."""


def prompts_of(path: Path, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """Chat prompts where the model has a template; else the messages' texts as raw prompts, every fifth a long one."""
    if tokenizer.has_chat_template:

        def template(messages: list[dict[str, Any]]) -> list[int]:
            text = tokenizer.render_chat([ChatMessage.model_validate(message) for message in messages])
            return tokenizer.encode_batch([text], add_special_tokens=False)[0].tolist()

        return [prompt.token_ids for prompt in read_workload(path, template, limit)]

    def raw(messages: list[dict[str, Any]]) -> list[int]:
        return tokenizer.encode_batch([messages[-1]["content"]], add_special_tokens=True)[0].tolist()

    prompts = [prompt.token_ids for prompt in read_workload(path, raw, limit)]
    for i in range(0, len(prompts), 5):
        rest = [token for prompt in prompts[i + 1 :] + prompts[:i] for token in prompt[1:]]
        prompts[i] = (prompts[i] + rest)[:LONG_PROMPT]
    return prompts


def settings_of(combinations: int | None, longest: int) -> list[tuple[str, Setting]]:
    """The settings to run, named: (part of) the covering array, the extremes, and one that preempts."""
    array = covering_settings()
    named = [("covering", setting) for setting in array[:combinations]]
    if combinations is None:
        extremes = (Setting(1, 16, 16, False), Setting(64, 2048, 128, True))
        named += [("extreme", setting) for setting in extremes if setting not in array]
    blocks = 3 * -(-longest // 16)
    return [*named, ("preempting", Setting(64, 256, 16, True, num_blocks=blocks))]


def check_float32(model: Any, path: Path, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Equality under every setting."""
    eos = Engine.load(path, Setting(1, 16, 16, False, num_blocks=64).config(max_model_len=512)).spec.eos_token_ids
    begun = time.perf_counter()
    want = [greedy_answer(model, prompt, args.max_tokens, eos) for prompt in prompts]
    print(f"transformers: {len(want)} answers in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    longest = max(map(len, prompts)) + args.max_tokens
    report = []
    for kind, setting in settings_of(args.combinations, longest):
        engine = Engine.load(path, setting.config(max_model_len=longest, threads=args.threads))
        begun = time.perf_counter()
        got = engine_answers(engine, prompts, args.max_tokens, expected_tokens=1 if kind == "preempting" else None)
        seconds = time.perf_counter() - begun
        ties = check_equal(want, got)
        stats = engine.stats()
        assert kind != "preempting" or stats.preemptions > 0, "the small pool preempted nothing"
        line = {
            "kind": kind,
            "batch": setting.batch_size,
            "chunk": setting.chunk_size,
            "block": setting.block_size,
            "prefix_caching": setting.prefix_caching,
            "equal": len(want) - ties,
            "stopped_at_a_tie": ties,
            "preemptions": stats.preemptions,
            "cached_tokens": stats.cached,
            "seconds": round(seconds, 1),
        }
        print(line, file=sys.stderr, flush=True)
        report.append(line)
    return report


@torch.inference_mode()
def check_bfloat16(
    load: Callable[[torch.dtype], Any], path: Path, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, int]:
    """At the first different token each side's choice is in the other's five likeliest."""
    model = load(torch.bfloat16)
    longest = max(map(len, prompts)) + args.max_tokens
    setting = Setting(64, 2048, 32, True)
    engine = Engine.load(path, setting.config(dtype="bfloat16", max_model_len=longest, threads=args.threads))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, logprobs=5)
    requests = [Request(str(i), as_token_ids(prompt), params) for i, prompt in enumerate(prompts)]
    done = {completion.request_id: completion for completion in engine.run(requests)}
    differing = 0
    for i, prompt in enumerate(prompts):
        completion = done[str(i)]
        want: Answer = greedy_answer(model, prompt, args.max_tokens, engine.spec.eos_token_ids)
        got, expected = tokens_of(completion), want.token_ids
        at = next((k for k, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), None)
        if at is None:
            assert len(got) == len(expected), f"prompt {i}: {len(got)} tokens, transformers {len(expected)}"
            continue
        differing += 1
        logits = model(torch.tensor([prompt + got[:at]])).logits[0, -1].float()
        assert got[at] in logits.topk(5).indices.tolist(), f"prompt {i}, token {at}: ours is not in their top 5"
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        # An end token that closed the answer has no line of its own; ask again for that place.
        ours = logprobs.top_ids[at] if at < len(logprobs.top_ids) else top_five(engine, prompt + got[:at])
        assert expected[at] in ours, f"prompt {i}, token {at}: theirs is not in our top 5"
    return {"prompts": len(prompts), "differing": differing, "violations": 0}


def top_five(engine: Engine, prompt: list[int]) -> np.ndarray[Any, Any]:
    """The engine's five likeliest next tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
    (completion,) = engine.run([Request("top", as_token_ids(prompt), params)])
    assert completion.choices[0].logprobs is not None
    return completion.choices[0].logprobs.top_ids[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--combinations", type=int, default=None, help="only the first N of the covering array")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    def load(dtype: torch.dtype) -> Any:
        folder, name = args.model.parent, args.model.name
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).to(dtype).eval()

    prompts = prompts_of(args.workload, Tokenizer.load(args.model), args.prompts)
    lengths = sorted(map(len, prompts))
    report = {
        "model": args.model.name,
        "workload": args.workload.name,
        "prompts": len(prompts),
        "prompt_tokens": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
        "max_tokens": args.max_tokens,
        "float32": check_float32(load(torch.float32), args.model, prompts, args),
        "bfloat16": check_bfloat16(load, args.model, prompts, args),
        "machine": machine(),
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"float32_settings": len(report["float32"]), "bfloat16": report["bfloat16"]}))


if __name__ == "__main__":
    main()
