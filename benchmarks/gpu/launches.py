"""The host's time to launch a step: steps of an 8B shape one by one, with a graph and without.

Each step is one prompt and its first token, so it lasts as long as the device computes or as long as the host launches,
whichever is longer. Without a graph short steps take the host's time: that is `LAUNCH_SECONDS` of
`engine.runner.step_size` for each layer. A graph no longer helps from the size on where both take as long.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu.context import Context, synchronize
from benchmarks.gpu.models import LLAMA, load_engine, write_config
from benchmarks.gpu.serve import variants
from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig

SECONDS = 20.0
"""Of one engine, at least."""


def of_steps(context: Context, graphs: bool) -> dict[str, Any]:
    """Seconds of a step by its tokens, in all and for each layer; how many of the steps replayed a graph."""
    context.need(context.sized(SECONDS, 0.1))
    sizes = context.sized((64, 128, 256, 512, 1024, 2048), (4, 8))
    model = context.sized(LLAMA, "tiny-llama")
    config = EngineConfig(
        device="cpu" if context.dry else "cuda",
        max_model_len=sizes[-1] + 1,
        async_scheduling=False,
        cuda_graphs=graphs and not context.dry,
        max_graph_tokens=sizes[-1],
        cache=CacheConfig(memory_bytes=context.sized(2 << 30, 1 << 20), prefix_caching=False),
        schedule=ScheduleConfig(context.sized(16, 2), sizes[-1]),
    )
    settings = {**variants(context)[0].settings, **context.settings, "async_scheduling": False}
    engine = load_engine(write_config(context.folder, model), with_overrides(config, settings))
    return {f"{tokens} tokens": of_size(context, engine, tokens) for tokens in sizes}


def of_size(context: Context, engine: Engine, tokens: int) -> dict[str, Any]:
    """The median of some steps of one prompt."""
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    before, found = engine.stats(), []
    repeats, warmups = context.sized((15, 3), (1, 1))
    for index in range(warmups + repeats):
        ids = rng.integers(3, engine.spec.vocab_size, tokens).astype(np.int32)
        engine.add(Request(f"{tokens}-{index}", ids, params))
        synchronize(context.device)
        begun = time.perf_counter()
        (completion,) = engine.step()
        found.append(time.perf_counter() - begun)
        if completion.error is not None:
            raise RuntimeError(f"request {completion.request_id} failed: {completion.error}")
    after = engine.stats()
    seconds = statistics.median(found[warmups:])
    return {
        "seconds": seconds,
        "seconds_a_layer": seconds / engine.spec.num_layers,
        "steps": after.steps - before.steps,
        "steps_recorded": after.steps_recorded - before.steps_recorded,
    }
