"""Stage `mixed`: a whole job of 4,000 requests of all lengths, some with long beginnings in common, from first to last.

What a steady state leaves out counts here: the start, the tail in which the batch empties, and prefixes that are
computed once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu.context import Context, Part, free_memory, tried
from benchmarks.gpu.models import CONFIGS, LLAMA, load_engine, write_config
from benchmarks.gpu.roofline import Shape, bound
from benchmarks.gpu.serve import Variant, loop_counts, variants
from benchmarks.gpu.workloads import mixed_job
from benchmarks.peers.offline import Prompt
from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids

_SECONDS = 90.0


def run(context: Context) -> Iterator[Part]:
    """The job in each form."""
    model = context.sized(LLAMA, "tiny-llama")
    vocab = int(CONFIGS[model]["vocab_size"])
    job = mixed_job(context.sized(4000, 12), vocab, most_tokens=context.sized(None, 24))
    for variant in variants(context)[:2]:
        yield f"{model} {variant.name}", tried(partial(whole, context, model, variant, job))
        free_memory(context.device)


def whole(context: Context, model: str, variant: Variant, job: list[Prompt]) -> dict[str, Any]:
    """Load, warm up on a few other requests, then the job; stopped in time, with what it had."""
    context.need(context.sized(_SECONDS, 0.5))
    longest = max(len(prompt.token_ids) + prompt.max_tokens for prompt in job)
    config = EngineConfig(
        device="cpu" if context.dry else "cuda",
        max_model_len=longest + 1,
        cache=CacheConfig(gpu_memory_utilization=0.9, sequences=context.batch, tokens_per_sequence=longest),
        schedule=ScheduleConfig(context.batch, context.sized(8192, 64)),
    )
    config = with_overrides(config, {**variant.settings, **context.settings})
    engine = load_engine(write_config(context.folder, model), config)
    for _ in engine.run(requests(job[: context.batch], "warm-up")):
        pass
    found = timed(engine, job, context)
    return {"requests": len(job), **found, "bound": against_bound(found, job, model, variant, context)}


def requests(job: list[Prompt], name: str) -> list[Request]:
    """Of a job; each pass has a salt of its own, so none finds what another left in the prefix cache."""
    return [
        Request(
            f"{name}-{prompt.custom_id}",
            as_token_ids(prompt.token_ids),
            SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True),
            salt=name.encode(),
        )
        for prompt in job
    ]


def timed(engine: Engine, job: list[Prompt], context: Context) -> dict[str, Any]:
    """One pass: whole time, and output tokens over it."""
    before = engine.stats()
    begun = time.perf_counter()
    done, output, full = 0, 0, 0.0
    for completion in engine.run(requests(job, "job")):
        if completion.error is not None:
            raise RuntimeError(f"request {completion.request_id} failed: {completion.error}")
        done += 1
        output += len(completion.choices[0].token_ids)
        if engine.num_waiting or not full:
            full = time.perf_counter() - begun
        if context.left() < 5 and not context.dry:
            break
    seconds = time.perf_counter() - begun
    after = engine.stats()
    steps = after.steps - before.steps
    return {
        "done": done,
        "seconds": seconds,
        "seconds_until_none_waited": full,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in job),
        "cached_tokens": after.cached - before.cached,
        "steps": steps,
        "mean_rows": (after.step_rows - before.step_rows) / max(1, steps),
        "preemptions": after.preemptions - before.preemptions,
        **loop_counts(before, after),
    }


def against_bound(
    found: dict[str, Any], job: list[Prompt], model: str, variant: Variant, context: Context
) -> dict[str, Any]:
    """The bound of the whole job, with what the prefix cache saved taken off; decoding reads shared keys each time."""
    if context.rates is None:
        return {"error": "the stage machine has not measured this machine"}
    if variant.form.weights == 1 and context.rates.fp8 is None:
        return {"error": "no fp8 rate was measured here"}
    lengths = [(len(prompt.token_ids), prompt.max_tokens) for prompt in job]
    least = bound(
        Shape.of(CONFIGS[model]), variant.form, context.rates, lengths, batch=context.batch,
        cached=found["cached_tokens"],
    )  # fmt: skip
    share = least.seconds / found["seconds"] if found["done"] == len(job) else None
    return {"seconds": least.seconds, "share": share, **asdict(least)}
