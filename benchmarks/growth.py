"""Whether speed keeps: over ever more rows, and over ever longer contexts.

    python benchmarks/growth.py rows --model MODEL [--rows …] [--pipeline-rows …] [--model-rows …] [--json FILE]
    python benchmarks/growth.py context --model MODEL [--contexts 128,512,2048,8192] [--batch 1] [--set …] [--json FILE]

`rows` looks for whatever costs more per row when there are more of them, in three places:
engine    the engine alone with all rows waiting in it, without a model, so that a step's own cost is not hidden;
pipeline  whole jobs without a model, from acceptance to the last part; from size to size, what the rows that were added
          took, so what a job costs once (loading, the first shard) is left out;
model     whole jobs with the model, on prompts of a line and answers of 8 tokens, from the engine's first step to its
          last, for as many rows as time allows.
Each in turns, smallest first, as often as `--rounds` says. No size may be more than 5 % slower than the smallest one.

`context`: rows of random tokens that decode at a given context, all at once: time of a step beside its roofline, whose
peaks are measured in the same run (see roofline.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from big_job import Null, write_input
from engine_settings import SettingError, parse_overrides, with_overrides
from machine_peaks import PeaksError, disturbed, measure
from pipeline_cost import warm
from roofline import ModelCost, Precision, decoder_of, roofline
from step_record import StepRecorder
from throughput import machine

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.models.load import describe_model
from pipeline.inputs.pinning import pin_input
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.local.run_job import run_job
from tokenmill.local.run_plan import RunPlan, load_model
from tokenmill.local.tracker import RunTracker
from tokenmill.models.sources import ModelSource
from tokenmill.processes.logging import log_to_stderr
from tokenmill.processes.runtime import frozen_heap
from workers.model.loaded_model import LoadedModel

ALLOWED = 0.05
"""How much slower a larger size may be than the smallest one."""

SHORT_PROMPT, SHORT_ANSWER = 24, 8
NULL_BLOCKS = 8192
REPEAT_ROWS = 10_000  # a size is repeated in a round until so many rows ran: small ones are over at once
DECODED = 32  # tokens a row generates at each context
SEED = 7


def write_short_input(path: Path, rows: int) -> None:
    """Requests of about 30 tokens, all different, 8 tokens of answer."""
    with path.open("w", encoding="utf-8") as out:
        for row in range(rows):
            body = {"model": "model", "prompt": f"Item {row * 7919 % 1_000_003}: describe it in one line.\nAnswer:"}
            body |= {"max_tokens": SHORT_ANSWER, "temperature": 0, "ignore_eos": True}  # type: ignore[dict-item]
            line = {"custom_id": f"r{row}", "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")


def one_job(model: Path, rows: int, *, null: bool, threads: int | None) -> dict[str, Any]:
    """Run one job of so many rows here; what its manifest says."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        source = Path(name) / "in.jsonl"
        if null:
            write_input(source, rows, SEED)
        else:
            write_short_input(source, rows)
        plan = RunPlan(
            inputs=pin_input(source),
            models=(ChosenModel("model", ModelSource("model", model.resolve(), None, 0)),),
            output=Path(name) / "out",
            tier=Tier.STANDARD,
            settings=JobSettings(),
            engine=EngineOptions(threads=threads),
        )

        def load(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
            loaded = load_model(plan, pin, segments)
            warm(loaded)
            return loaded

        manifest = run_job(plan, RunTracker(), threading.Event(), Null().load if null else load).manifest
    assert manifest is not None
    assert manifest.counts.succeeded == rows, manifest.counts
    assert manifest.engine_seconds is not None
    tokens = manifest.usage.prompt + manifest.usage.completion
    return {
        "rows": rows,
        "tokens": tokens,
        "engine_seconds": manifest.engine_seconds,
        "wall_seconds": manifest.wall_seconds,
        "tokens_per_second": tokens / manifest.engine_seconds,
    }


def engine_alone(model: Path, rows: int) -> float:
    """Tokens per second of the engine with all rows in it at once, whose steps cost nothing."""
    spec = replace(describe_model(model).spec, windows=(None,), num_layers=1)
    engine = Engine.without_model(spec, EngineConfig(), num_blocks=NULL_BLOCKS)
    params = SamplingParams(max_tokens=SHORT_ANSWER, temperature=0.0, ignore_eos=True)
    prompts = np.random.default_rng(SEED).integers(5, spec.vocab_size, (rows, SHORT_PROMPT), dtype=np.int32)
    requests = [Request(str(row), prompt, params) for row, prompt in enumerate(prompts)]
    with frozen_heap():
        begun = time.perf_counter()
        tokens = sum(done.prompt_tokens + done.generated_tokens for done in engine.run(requests))
        return tokens / (time.perf_counter() - begun)


def growth(rates: dict[int, list[float]]) -> dict[str, Any]:
    """Median tokens per second of each size, and how far behind the smallest size the slowest larger one is."""
    medians = {size: statistics.median(values) for size, values in rates.items()}
    sizes = sorted(medians)
    loss = max([1 - medians[size] / medians[sizes[0]] for size in sizes[1:]], default=0.0)
    return {"tokens_per_second": medians, "loss": loss, "within_allowed": loss <= ALLOWED, "runs": rates}


def added(jobs: Sequence[dict[str, Any]]) -> dict[int, float]:
    """For each job but the smallest: tokens per second of the rows that it has more than the one before it."""
    pairs = pairwise(sorted(jobs, key=lambda job: job["rows"]))
    return {
        more["rows"]: (more["tokens"] - less["tokens"]) / (more["wall_seconds"] - less["wall_seconds"])
        for less, more in pairs
    }


def child_job(args: argparse.Namespace, rows: int, *, null: bool) -> dict[str, Any]:
    """`one_job` in a process of its own, so that no run inherits another's memory."""
    command = [sys.executable, __file__, "job", "--model", str(args.model), "--rows", str(rows)]
    command += ["--null"] if null else []
    command += ["--threads", str(args.threads)] if args.threads else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{'pipeline' if null else 'model'}: {found}", file=sys.stderr, flush=True)
    return found


def grow_rows(args: argparse.Namespace) -> dict[str, Any]:
    """The three parts that are asked for, all sizes in turns."""
    rates: dict[str, dict[int, list[float]]] = {"engine": {}, "pipeline": {}, "model": {}}

    def note(part: str, size: int, rate: float) -> None:
        rates[part].setdefault(size, []).append(rate)

    for _ in range(args.rounds):
        for size in args.rows:
            for _ in range(max(1, REPEAT_ROWS // size)):
                note("engine", size, engine_alone(args.model, size))
        for size, rate in added([child_job(args, size, null=True) for size in args.pipeline_rows]).items():
            note("pipeline", size, rate)
        for size in args.model_rows:
            note("model", size, child_job(args, size, null=False)["tokens_per_second"])
    return {part: growth(found) for part, found in rates.items() if found}


def decode_at(engine: Engine, recorder: StepRecorder, context: int, batch: int, name: str) -> dict[str, Any]:
    """Time a step in which `batch` rows of about `context` tokens each compute one token; its steps are in "steps"."""
    chance = np.random.default_rng(SEED)
    prefills = -(-batch * context // engine.config.schedule.tokens)  # steps until all rows decode
    answer = min(DECODED + prefills, engine.max_model_len // 2)
    prompt_tokens = max(1, min(context - answer // 2, engine.max_model_len - answer))
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    for row in range(batch):
        ids = as_token_ids(chance.integers(5, engine.spec.vocab_size, prompt_tokens, dtype=np.int32))
        engine.add(Request(f"{name}-{row}", ids, params))
    recorder.take()
    while engine.has_work:
        engine.step()
    steps = [step for step in recorder.take() if step.tokens == step.rows == batch]
    if len(steps) < DECODED // 2:
        raise SystemExit(f"error: {batch} rows of {context} tokens never ran together; give the cache more memory")
    starts = [step.begun for step in steps]
    return {
        "context": prompt_tokens + answer - len(steps) // 2,
        "batch": batch,
        "step_seconds": statistics.median(b - a for a, b in pairwise(starts)),
        "steps": steps,
    }


def grow_context(args: argparse.Namespace) -> dict[str, Any]:
    """Steps at each context, in turns, beside their rooflines."""
    config = EngineConfig(
        threads=args.threads,
        cache=CacheConfig(
            sequences=args.batch, tokens_per_sequence=max(args.contexts) + 2 * DECODED, prefix_caching=False
        ),
        schedule=ScheduleConfig(max_num_seqs=args.batch),
    )
    config = with_overrides(config, parse_overrides(args.overrides))
    engine = Engine.load(args.model, config)
    if max(args.contexts) > engine.max_model_len:
        raise SystemExit(f"error: the model's context is {engine.max_model_len}; name no longer one with --contexts")
    threads = torch.get_num_threads()
    before = measure(sorted({1, threads}))
    recorder = StepRecorder.attach(engine)
    decode_at(engine, recorder, min(args.contexts), args.batch, "warm-up")
    found = [
        decode_at(engine, recorder, context, args.batch, f"{turn}-{context}")
        for turn in range(args.rounds)
        for context in args.contexts
    ]
    after = measure(sorted({1, threads}))
    peaks = before[threads].best_with(after[threads])
    cost = ModelCost.of(decoder_of(args.model), Precision.of(config, engine.spec.dtype))
    for entry in found:
        steps = entry.pop("steps")
        limit = roofline(steps, cost, peaks, entry["step_seconds"] * len(steps))
        entry |= {"limit_seconds": limit.limit_seconds / len(steps), "share": limit.share}
        entry["seconds_per_token"] = entry["step_seconds"] / args.batch
        print(
            f"context {entry['context']:5}: {1000 * entry['step_seconds']:7.2f} ms a step of {args.batch}, limit "
            f"{1000 * entry['limit_seconds']:6.2f} ms ({entry['share']:.0%})",
            file=sys.stderr,
        )
    return {
        "settings": asdict(config),
        "disturbed": disturbed(before) or disturbed(after),
        "peaks": asdict(peaks),
        "cost": asdict(cost),
        "contexts": found,
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("rows", "context", "job"):
        command = commands.add_parser(name)
        command.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
        command.add_argument("--threads", type=int, default=None)
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--json", type=Path, default=None)
    commands.choices["rows"].add_argument("--rows", type=numbers, default=[1_000, 10_000, 100_000])
    commands.choices["rows"].add_argument("--pipeline-rows", type=numbers, default=[1_000, 10_000, 100_000])
    commands.choices["rows"].add_argument("--model-rows", type=numbers, default=[300, 1_000, 3_000])
    commands.choices["context"].add_argument("--contexts", type=numbers, default=[128, 512, 2_048, 8_192])
    commands.choices["context"].add_argument("--batch", type=int, default=1)
    commands.choices["context"].add_argument("--set", default="", dest="overrides", help="key:value,key:value")
    commands.choices["job"].add_argument("--rows", type=int, required=True)
    commands.choices["job"].add_argument("--null", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    log_to_stderr()
    if args.command == "job":
        print(json.dumps(one_job(args.model, args.rows, null=args.null, threads=args.threads)))
        return
    try:
        found = grow_rows(args) if args.command == "rows" else grow_context(args)
    except (SettingError, PeaksError) as error:
        raise SystemExit(f"error: {error}") from error
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = {"model": args.model.name, "machine": machine(), "measured_at": measured_at, **found}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.command == "rows":
        print(json.dumps({name: {k: v for k, v in part.items() if k != "runs"} for name, part in found.items()}))


if __name__ == "__main__":
    main()
