"""Stage `peers`: the same prompts through our engine, transformers' continuous batching, and vLLM if it came along.

Each runs in a process of its own and one after the other, ours before vLLM and after it; each warms up on the whole job
with other first tokens. Only generation is timed. A peer that does not start, or gives an answer of another length than
was asked for, has no result, and the reason stands in its place.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.context import Context, Part, Skipped, tried
from benchmarks.gpu.models import CONFIGS, LLAMA, write_config
from benchmarks.gpu.serve import variants
from benchmarks.gpu.workloads import random_job
from benchmarks.peers.process import run as run_process
from benchmarks.workload import Prompt, write_prompts

ROOT = Path(__file__).parent.parent.parent

_START_SECONDS = 40.0
"""What an engine may take to load and warm up, at least."""

_AGAIN = "tokenmill again"

_AGAIN_SECONDS = 45.0
"""What our second run takes: reserved for it."""


@dataclass(frozen=True, slots=True)
class Runner:
    """An engine: its module, its options, and the environment it wants."""

    name: str
    module: str
    options: Mapping[str, Any]
    warmup: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def run(context: Context) -> Iterator[Part]:
    """All of them on one job, and the ratios at the end."""
    model = context.sized(LLAMA, "tiny-llama")
    vocab = int(CONFIGS[model]["vocab_size"])
    lengths = context.sized(((64, 1024), (64, 512)), ((4, 12), (2, 6)))
    job = [Prompt(p.custom_id, p.token_ids, p.max_tokens) for p in random_job(context.sized(256, 6), vocab, *lengths)]
    file = context.folder / "peers.json"
    write_prompts(file, job)
    wanted = [prompt.max_tokens for prompt in job]
    yield "job", {"requests": len(job), "prompt_tokens": sum(len(p.token_ids) for p in job), "output": sum(wanted)}
    found: dict[str, dict[str, Any]] = {}
    runners = plan(context)
    for label, runner in runners.items():
        reserve = _AGAIN_SECONDS if _AGAIN in runners and _AGAIN not in found and label != _AGAIN else 0.0
        folder = write_config(context.folder, model)
        found[label] = tried(partial(measured, context, runner, file, folder, wanted, reserve))
        yield label, found[label]
    yield "ratios", ratios(found)


def plan(context: Context) -> dict[str, Runner]:
    """What runs, in order."""
    bf16 = variants(context)[0]
    settings = {
        "device": "cpu" if context.dry else "cuda",
        "cache.prefix_caching": False,
        "cache.gpu_memory_utilization": 0.85,
        "cache.memory_fraction": 0.3,
        "schedule.max_num_seqs": context.batch,
        "schedule.max_num_batched_tokens": context.sized(8192, 64),
        "max_model_len": context.sized(2048, 64),
        **bf16.settings,
        **context.settings,
    }
    ours = Runner("tokenmill", "benchmarks.gpu.runners.run_tokenmill", {"settings": settings})
    pages = {"num_blocks": 8, "max_batch_tokens": 64} if context.dry else {}
    theirs = Runner(
        "transformers", "benchmarks.gpu.runners.run_transformers",
        {"device": "cpu" if context.dry else "cuda", "batching": pages}, warmup=context.sized(16, 1),
    )  # fmt: skip
    options = {"dtype": "bfloat16", "max_num_seqs": context.batch, "max_num_batched_tokens": 8192}
    options |= {"gpu_memory_utilization": 0.85}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # FlashInfer does not come along, and greedy rows need none
    vllm = Runner("vllm", "benchmarks.gpu.runners.run_vllm", options, env=env)
    eager = Runner("vllm", vllm.module, {**options, "enforce_eager": True}, env=env)
    if context.dry:
        return {"tokenmill": ours, "vllm": vllm, "transformers": theirs}
    return {"tokenmill": ours, "vllm": vllm, _AGAIN: ours, "vllm, eager": eager, "transformers": theirs}


def measured(
    context: Context, runner: Runner, file: Path, model: Path, wanted: list[int], reserve: float
) -> dict[str, Any]:
    """One engine's run, which may take what is left of the stage's time but `reserve` seconds.

    Raises:
        Skipped: vLLM is not here.
    """
    if runner.name == "vllm" and context.vllm is None and find_spec("vllm") is None:
        raise Skipped("vLLM is not installed, and no folder with it was named (--vllm)")
    context.need(context.sized(_START_SECONDS, 1.0))
    most = max(context.left() - reserve, context.sized(_START_SECONDS, 30.0))
    command = [sys.executable, "-m", runner.module, str(file), "--model", str(model)]
    command += ["--options", json.dumps(dict(runner.options)), "--threads", "1"]
    if runner.warmup is not None:
        command += ["--warmup", str(runner.warmup)]
    path = [str(ROOT), *([str(context.vllm)] if runner.name == "vllm" and context.vllm is not None else [])]
    log = context.folder / f"peers-{runner.name}.log"
    cpus = sorted(os.sched_getaffinity(0))
    env = {"PYTHONPATH": os.pathsep.join([*path, *inherited()]), **runner.env}
    done = run_process(command, log, limit=min(most, max(1.0, context.left())), cpus=cpus, env=env)
    if done.returncode != 0:
        reason = "not done in time" if done.returncode is None else f"exit status {done.returncode}"
        return {"error": reason, "seconds_spent": done.seconds, "log": done.log[-4000:]}
    line = json.loads(done.stdout.strip().splitlines()[-1])
    lengths = line.pop("output_lengths")
    if lengths != wanted:
        return {"error": "answers of other lengths than were asked for", "lengths": lengths[:20]}
    rate = line.pop("output_tokens_per_second")["median"]
    return {
        "output_tokens_per_second": rate,
        "seconds": line.pop("wall_seconds"),
        "process_seconds": done.seconds,
        "peak_rss_bytes": done.peak_rss_bytes,
        **line,
    }


def inherited() -> list[str]:
    """Of PYTHONPATH, what this process was started with."""
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many times as fast ours was, by the mean of its runs."""
    rates = {name: one["output_tokens_per_second"] for name, one in found.items() if "output_tokens_per_second" in one}
    ours = [rate for name, rate in rates.items() if name.startswith("tokenmill")]
    if not ours:
        return {"error": "our engine has no result"}
    mean = sum(ours) / len(ours)
    return {f"ours / {name}": mean / rate for name, rate in rates.items() if not name.startswith("tokenmill")}
