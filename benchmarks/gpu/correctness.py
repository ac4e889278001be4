"""Stage `correctness`: our engine on this device against transformers on it, with the same random weights.

At float32 greedy tokens must be equal up to a near tie. At bf16 two engines round differently, so what is checked is
vLLM's rule for log-probabilities (where answers part, each one's token is among the other's likeliest), and how far
both lie from float32 along given texts. Then every way to compute must give what the plain one gives: other backends,
other chunks, steps planned ahead and recorded as graphs, and steps run one by one; and an fp8 cache what one in full
precision gives, nearly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu import attention
from benchmarks.gpu.context import Context, Part, Skipped, free_memory, tried
from benchmarks.gpu.models import load_engine, load_transformers, write_config
from engine import CacheConfig, Completion, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.attention.choice import supports_fp8_cache

TIE = 1e-3
"""Two best logits that are closer than this may change places at float32 between devices' kernels."""

TOP = 5
"""Likeliest tokens that are compared."""

FORCED = {"mean": 0.02, "times": 2.0}
"""Our bf16 log-probabilities may lie as far from float32's in the mean, or this many times as far as transformers'."""

EAGER: Mapping[str, Any] = {"async_scheduling": False, "cuda_graphs": False}
"""Steps one by one, each launched anew."""

FP8_CACHE = 0.1
"""How far log-probabilities of given texts may move in the mean when the cache is fp8."""

_MODEL_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer with what is known of each token: its lead over the second, the likeliest ones, its
    log-probability."""

    token_ids: list[int]
    leads: list[float]
    top: list[list[int]]


def run(context: Context) -> Iterator[Part]:
    """Both families, then the kernels, then the demo model."""
    for family in ("llama", "qwen3"):
        folder = write_config(context.folder, f"{context.sized('small', 'tiny')}-{family}")
        checks = {
            "greedy float32": greedy, "log-probabilities bf16": close, "given texts": forced, "paths": paths,
            "ahead and recorded": ahead, "fp8 cache": fp8_cache,
        }  # fmt: skip
        for name, check in checks.items():
            yield f"{family} {name}", tried(partial(check, context, folder))
            free_memory(context.device)
    for name, case in attention.check_cases(context).items():
        yield f"kernel {name}", tried(partial(attention.check, context, case, torch.float32))
    yield "demo model", tried(partial(demo, context))


def texts(context: Context) -> list[list[int]]:
    """Prompts of several lengths, some with a beginning in common."""
    rng = np.random.default_rng(5)
    vocab, count, longest = context.sized((2048, 24, 300), (256, 3, 12))
    head = rng.integers(3, vocab, longest // 3).tolist()
    found = []
    for index in range(count):
        tail = rng.integers(3, vocab, int(rng.integers(1, longest))).tolist()
        found.append(head + tail if index % 3 else tail)
    return found


def engine_of(context: Context, folder: Path, dtype: str, **settings: Any) -> Engine:
    """An engine with a small batch and small chunks, so that a step holds prompts and decoding rows."""
    config = EngineConfig(
        device="cpu" if context.dry else "cuda",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        attention="paged-sdpa" if context.dry else "auto",
        max_model_len=1024,
        cache=CacheConfig(memory_bytes=context.sized(4 << 30, 64 << 20), tokens_per_sequence=512),
        schedule=ScheduleConfig(16, context.sized(256, 16)),
    )
    return load_engine(folder, with_overrides(config, {**settings, **context.settings}))


def answers(engine: Engine, prompts: Sequence[Sequence[int]], most: int, **params: Any) -> list[Completion]:
    """Greedy completions, in the prompts' order."""
    wanted = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, **params)
    found = {each.request_id: each for each in engine.run(
        Request(str(i), as_token_ids(prompt), wanted) for i, prompt in enumerate(prompts)
    )}  # fmt: skip
    for completion in found.values():
        if completion.error is not None:
            raise RuntimeError(f"request {completion.request_id} failed: {completion.error}")
    return [found[str(i)] for i in range(len(prompts))]


@torch.inference_mode()
def answer_of(model: Any, prompt: Sequence[int], most: int) -> Answer:
    """transformers' greedy answer to one prompt."""
    found = Answer([], [], [])
    ids, cache = torch.tensor([list(prompt)], device=model.device), None
    for _ in range(most):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].float().topk(TOP)
        found.token_ids.append(int(best.indices[0]))
        found.leads.append(float(best.values[0] - best.values[1]))
        found.top.append(best.indices.tolist())
        ids = best.indices[None, :1]
    return found


def greedy(context: Context, folder: Path) -> dict[str, Any]:
    """Equal tokens at float32, up to a near tie."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    prompts, most = texts(context), context.sized(48, 4)
    model = load_transformers(folder, torch.float32, context.device)
    wanted = [answer_of(model, prompt, most) for prompt in prompts]
    got = answers(engine_of(context, folder, "float32"), prompts, most)
    compared, ties, unequal = 0, 0, []
    for index, (want, completion) in enumerate(zip(wanted, got, strict=True)):
        tokens = completion.choices[0].token_ids.tolist()
        for at, (token, lead) in enumerate(zip(want.token_ids, want.leads, strict=True)):
            if lead < TIE:
                ties += 1
                break
            compared += 1
            if tokens[at] != token:
                unequal.append({"prompt": index, "token": at, "ours": tokens[at], "wanted": token, "lead": lead})
                break
    return {"prompts": len(prompts), "tokens": compared, "ties": ties, "unequal": unequal, "ok": not unequal}


def close(context: Context, folder: Path) -> dict[str, Any]:
    """vLLM's rule (`check_logprobs_close`): where two answers part, each one's token is among the other's likeliest;
    what follows is not compared."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    prompts, most = texts(context), context.sized(48, 4)
    model = load_transformers(folder, torch.bfloat16, context.device)
    wanted = [answer_of(model, prompt, most) for prompt in prompts]
    got = answers(engine_of(context, folder, "bfloat16"), prompts, most, logprobs=TOP)
    compared, parted, apart = 0, 0, []
    for index, (want, completion) in enumerate(zip(wanted, got, strict=True)):
        choice = completion.choices[0]
        assert choice.logprobs is not None, "log-probabilities were asked for"
        for at, (token, ours) in enumerate(zip(want.token_ids, choice.token_ids.tolist(), strict=True)):
            compared += 1
            if ours == token:
                continue
            parted += 1
            if ours not in want.top[at] or token not in choice.logprobs.top_ids[at].tolist():
                apart.append({"prompt": index, "token": at, "ours": ours, "wanted": token})
            break
    return {"prompts": len(prompts), "tokens": compared, "parted": parted, "apart": apart, "ok": not apart}


def forced(context: Context, folder: Path) -> dict[str, Any]:
    """How far bf16 log-probabilities of given texts lie from transformers' at float32: ours, and transformers' own."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    prompts = [prompt for prompt in texts(context) if len(prompt) > 1]
    exact = scores(load_transformers(folder, torch.float32, context.device), prompts)
    theirs = scores(load_transformers(folder, torch.bfloat16, context.device), prompts)
    found = {"transformers bf16": difference(theirs, exact)}
    for dtype in ("float32", "bfloat16"):
        found[f"ours {dtype}"] = difference(our_scores(engine_of(context, folder, dtype), prompts), exact)
    allowed = max(FORCED["mean"], FORCED["times"] * found["transformers bf16"]["mean"])
    ok = found["ours bfloat16"]["mean"] <= allowed and found["ours float32"]["most"] < 1e-2
    return {**found, "allowed_mean": allowed, "ok": ok}


def our_scores(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """As `scores`, of our engine."""
    found = []
    for completion in answers(engine, prompts, 0, prompt_logprobs=0):
        assert completion.prompt_logprobs is not None, "they were asked for"
        found.append(torch.from_numpy(completion.prompt_logprobs.chosen[1:].copy()))
    return found


@torch.inference_mode()
def scores(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 [tokens - 1] for each text: log-probabilities of all tokens but the first."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].cpu())
    return found


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> dict[str, float]:
    """Mean and largest absolute difference, token by token."""
    apart = torch.cat([(one - other).abs() for one, other in zip(some, others, strict=True)])
    return {"tokens": float(len(apart)), "mean": float(apart.mean()), "most": float(apart.max())}


def paths(context: Context, folder: Path) -> dict[str, Any]:
    """Greedy tokens at float32 by every way to compute, against the plain one: one request at a time, by definition."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    prompts, most = texts(context), context.sized(32, 3)
    alone = {"attention": "reference", "schedule.max_num_seqs": 1, **EAGER}
    plain = tokens_of(engine_of(context, folder, "float32", **alone), prompts, most)
    found: dict[str, Any] = {}
    for name, settings in ways(context).items():

        def one(settings: dict[str, Any] = settings) -> dict[str, Any]:
            mine = tokens_of(engine_of(context, folder, "float32", **settings), prompts, most)
            equal = sum(a == b for a, b in zip(mine, plain, strict=True))
            return {"equal": equal, "of": len(prompts), "ok": equal >= 0.9 * len(prompts)}

        found[name] = tried(one)
    return {"ways": found, "ok": all(way.get("ok", "skipped" in way) for way in found.values())}


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    return [each.choices[0].token_ids.tolist() for each in answers(engine, prompts, most)]


def ways(context: Context) -> dict[str, dict[str, Any]]:
    """Settings that must change nothing."""
    found: dict[str, dict[str, Any]] = {
        "default": {},
        "torch's attention": {"attention": "paged-sdpa"},
        "blocks of 16, no prefix cache": {"cache.block_size": 16, "cache.prefix_caching": False},
        "long chunks": {"schedule.max_num_batched_tokens": context.sized(2048, 64)},
    }
    for graphs in (False,) if context.dry else (False, True):
        for ahead in (False, True):
            name = f"{'ahead' if ahead else 'one by one'}, {'graphs' if graphs else 'eager'}"
            found[name] = {"async_scheduling": ahead, "cuda_graphs": graphs}
    return found


def ahead(context: Context, folder: Path) -> dict[str, Any]:
    """Steps planned ahead and recorded as graphs against eager ones, one by one: greedy tokens at float32, and the
    log-probabilities of the same tokens as they are served, up to where answers part."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    prompts, most = texts(context), context.sized(48, 4)
    overlapped = {"async_scheduling": True, "cuda_graphs": not context.dry}
    engine = engine_of(context, folder, "float32", **overlapped)
    pairs = zip(
        tokens_of(engine, prompts, most), tokens_of(engine_of(context, folder, "float32", **EAGER), prompts, most),
        strict=True,
    )  # fmt: skip
    equal = sum(one == other for one, other in pairs)
    stats = engine.stats()
    dtype = context.sized("bfloat16", "float32")
    mine, plain = (
        answers(engine_of(context, folder, dtype, **settings), prompts, most, logprobs=0)
        for settings in (overlapped, EAGER)
    )
    apart = difference(*zip(*map(along_common_tokens, mine, plain), strict=True))
    tried_it = stats.steps_ahead > 0 and (context.dry or stats.steps_recorded > 0)
    return {
        "equal": equal,
        "of": len(prompts),
        "log-probabilities": apart,
        "steps": stats.steps,
        "steps_ahead": stats.steps_ahead,
        "steps_awaited": stats.steps_not_ahead,
        "steps_recorded": stats.steps_recorded,
        "ok": tried_it and equal >= 0.9 * len(prompts) and apart["mean"] <= FORCED["mean"],
    }


def along_common_tokens(one: Completion, other: Completion) -> tuple[Tensor, Tensor]:
    """Both answers' log-probabilities, up to and with the first token in which they differ."""
    first, second = one.choices[0], other.choices[0]
    assert first.logprobs is not None, "they were asked for"
    assert second.logprobs is not None, "they were asked for"
    unlike = np.flatnonzero(first.token_ids != second.token_ids)
    count = int(unlike[0]) + 1 if len(unlike) else len(first.token_ids)
    return torch.tensor(first.logprobs.chosen[:count]), torch.tensor(second.logprobs.chosen[:count])


def fp8_cache(context: Context, folder: Path) -> dict[str, Any]:
    """How far log-probabilities of given texts move when keys and values are kept in fp8."""
    context.need(context.sized(_MODEL_SECONDS, 0.1))
    if not supports_fp8_cache(context.device):
        raise Skipped("no fp8 cache can be kept here")
    prompts = [prompt for prompt in texts(context) if len(prompt) > 1][: context.sized(24, 1)]
    dtype = context.sized("bfloat16", "float32")
    ours = [
        our_scores(engine_of(context, folder, dtype, attention="triton", kv_dtype=kv_dtype), prompts)
        for kv_dtype in ("fp8", "auto")
    ]
    apart = difference(*ours)
    return {**apart, "allowed_mean": FP8_CACHE, "ok": 0 < apart["mean"] <= FP8_CACHE}


def demo(context: Context) -> dict[str, Any]:
    """A real model, if its file came along: greedy tokens on this device against those on the CPU, at float32."""
    if context.gguf is None:
        raise Skipped("no GGUF file was named (--gguf)")
    context.need(context.sized(60.0, 0.1))
    found = []
    for device in ("cpu", "cpu" if context.dry else "cuda"):
        settings = {"device": device, "attention": "paged-sdpa" if device == "cpu" else "auto", "dtype": "float32"}
        config = EngineConfig(max_model_len=512, schedule=ScheduleConfig(8, 256))
        engine = Engine.load(context.gguf, with_overrides(config, {**settings, **context.settings}))
        rng = np.random.default_rng(9)
        prompts = [rng.integers(3, engine.spec.vocab_size, length).tolist() for length in (3, 40, 17)]
        found.append(tokens_of(engine, prompts, context.sized(24, 2)))
    equal = sum(a == b for a, b in zip(*found, strict=True))
    return {"equal": equal, "of": len(found[0]), "ok": equal == len(found[0])}
