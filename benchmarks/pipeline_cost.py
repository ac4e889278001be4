"""What the pipeline costs: a whole job (plan, shards, checkpoints, Parquet) against the bare engine on the same tokens.

    python benchmarks/pipeline_cost.py benchmarks/workloads/mixed.jsonl --model MODEL --pairs 5 [--json OUT.json]

In each round, in turns: the bare engine; the job; the job without checkpoints. Each gets an engine of its own, loaded
before the clock starts and warmed by one short request; the job's clock runs until its manifest stands. Greedy, end
tokens ignored, so all make the same number of tokens.

With `--engine vllm` (in vLLM's environment, libiomp5.so in LD_PRELOAD) the bare engine is `LLM.generate` with
vLLM's best settings, and the job runs on vLLM.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from throughput import machine
from workload import Prompt, read_workload

from engine import Request, SamplingParams, as_token_ids
from engine.request import Completion
from engine.vllm.engine import CPU_CACHE_BYTES
from engine.vllm.process import prepare_process
from pipeline.inputs.pinning import pin_input
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from schemas.requests.parsing import ChatMessage
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.local.run_job import run_job
from tokenmill.local.run_plan import RunPlan, load_model
from tokenmill.local.tracker import RunTracker
from tokenmill.models.sources import ModelSource
from tokenmill.processes.logging import log_to_stderr
from workers.model.loaded_model import LoadedModel
from workers.settings import WorkerSettings
from workers.text.tokenizer import Tokenizer


def warm(model: LoadedModel) -> None:
    """One short request: threads are up, and pages that every step touches are there."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    model.engine.add(Request("warm-up", as_token_ids(list(range(5, 60))), params))
    while model.engine.has_work:
        model.engine.step()


def bare(plan: RunPlan, prompts: list[Prompt]) -> tuple[float, int]:
    """Seconds and tokens of the engine alone, on token ids."""
    pin = ModelPin(name=plan.models[0].name, source=str(plan.models[0].source.path), dtype="bfloat16")
    model = LoadedModel.load(
        Path(pin.source),
        name=pin.name,
        config=plan.engine.config(max(len(p.token_ids) + p.max_tokens for p in prompts), len(prompts)),
        digest="",
    )
    warm(model)
    begun = time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True)
        model.engine.add(Request(str(i), as_token_ids(prompt.token_ids), params))
    done: list[Completion] = []
    while model.engine.has_work:
        done += model.engine.step()
    return time.perf_counter() - begun, sum(completion.generated_tokens for completion in done)


def bare_vllm(plan: RunPlan, prompts: list[Prompt]) -> tuple[float, int]:
    """Seconds and tokens of `LLM.generate`, with the settings of the pipeline's engine and of `peers/catalog.py`."""
    from vllm import LLM
    from vllm import SamplingParams as VLLMParams

    llm = LLM(
        str(plan.models[0].source.path), dtype=plan.engine.dtype, enforce_eager=True, enable_prefix_caching=True,
        max_num_seqs=plan.engine.max_num_seqs, max_num_batched_tokens=plan.engine.max_num_batched_tokens,
        max_model_len=2048, kv_cache_memory_bytes=CPU_CACHE_BYTES,
    )  # fmt: skip
    given = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
    short = VLLMParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(5, 60))}], short, use_tqdm=False)
    params = [VLLMParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, detokenize=False) for p in prompts]
    begun = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    llm.llm_engine.engine_core.shutdown()
    return seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


def job(plan: RunPlan) -> tuple[float, int]:
    """Seconds from the loaded model to the manifest, and tokens."""
    started: list[float] = []

    def load(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
        model = load_model(plan, pin, segments)
        warm(model)
        started.append(time.perf_counter())
        loaded.append(model)
        return model

    loaded: list[LoadedModel] = []
    done = run_job(plan, RunTracker(), threading.Event(), load)
    seconds = time.perf_counter() - started[0]
    loaded.pop().close()
    assert done.manifest is not None
    assert done.manifest.counts.failed == 0, done.manifest.counts
    return seconds, done.manifest.usage.completion


def write_input(workload: Path, to: Path) -> None:
    """The workload's requests for this model, greedy to their full length."""
    with to.open("w", encoding="utf-8") as out:
        for line in workload.read_text(encoding="utf-8").splitlines():
            request = json.loads(line)
            request["body"] |= {"model": "model", "temperature": 0, "ignore_eos": True}
            out.write(json.dumps(request) + "\n")


def spread(values: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": quartiles[1], "lower_quartile": quartiles[0], "upper_quartile": quartiles[2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", required=True, type=Path, help="a folder or a GGUF file")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", choices=("tokenmill", "vllm"), default="tokenmill")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs is at least 2: quartiles are reported")
    log_to_stderr()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "requests.jsonl"
        write_input(args.workload, source)

        def plan(name: str, checkpoint_seconds: float) -> RunPlan:
            return RunPlan(
                inputs=pin_input(source),
                models=(ChosenModel("model", ModelSource("model", args.model.resolve(), None, 0), None, args.engine),),
                output=Path(folder) / name,
                tier=Tier.STANDARD,
                settings=JobSettings(),
                engine=EngineOptions(dtype=args.dtype),
                worker=WorkerSettings(checkpoint_seconds=checkpoint_seconds),
            )

        if args.engine == "vllm":
            prepare_process()
        tokenizer = Tokenizer.load(args.model)
        prompts = read_workload(
            args.workload,
            lambda messages: tokenizer.encode_batch(
                [tokenizer.render_chat([ChatMessage.model_validate(m) for m in messages])], add_special_tokens=False
            )[0].tolist(),
        )
        rounds: list[dict[str, Any]] = []
        for i in range(args.pairs + 1):
            steps = {
                "bare": lambda: (bare_vllm if args.engine == "vllm" else bare)(plan("bare", 1.0), prompts),
                "job": lambda i=i: job(plan(f"job-{i}", 1.0)),
                "job_without_checkpoints": lambda i=i: job(plan(f"silent-{i}", math.inf)),
            }
            if args.engine == "vllm":
                del steps["job_without_checkpoints"]
            names = list(steps)
            order = names[i % len(names) :] + names[: i % len(names)]
            metrics = {name: steps[name]() for name in order}
            tokens = {name: count for name, (_, count) in metrics.items()}
            assert len(set(tokens.values())) == 1, tokens
            seconds = {name: round(time, 3) for name, (time, _) in metrics.items()}
            print("warm-up" if not i else f"round {i}", seconds, flush=True)
            if i:  # the first round warms the page cache and the clock of the CPU
                rounds.append({**seconds, "tokens": tokens["bare"]})
        report = {
            "workload": args.workload.name,
            "model": args.model.name,
            "dtype": args.dtype,
            "machine": machine(),
            "rounds": rounds,
            "engine": args.engine,
            "job_over_bare": spread([r["job"] / r["bare"] - 1 for r in rounds]),
        }
        if args.engine == "tokenmill":
            report["checkpoints_over_none"] = spread([r["job"] / r["job_without_checkpoints"] - 1 for r in rounds])
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(json.dumps({key: value for key, value in report.items() if "_over_" in key}))


if __name__ == "__main__":
    main()
