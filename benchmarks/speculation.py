"""What speculation gains where a batch is thin, and what it costs where it is full.

    python benchmarks/speculation.py copy --model MODEL [--batches 1,2,4] [--methods ngram,auto] [--json FILE]
    python benchmarks/speculation.py tail benchmarks/workloads/mixed.jsonl --model MODEL [--rounds 3] [--json FILE]
    python benchmarks/speculation.py full benchmarks/workloads/mixed.jsonl --model MODEL [--steps 100] [--json FILE]

`copy`: edit this function, quote these sentences: real text (Python's standard library, prose.txt), greedy, end tokens
honoured. `tail`: the whole workload, end tokens honoured; how long the last tokens take, which are those of the last
tenth of the time without speculation. `full`: 128 rows that all decode.

An engine without speculation and one with it compute the same thing in turn, a few seconds or one step each, so that a
machine whose speed drifts is the same for both. Answers must be equal, token for token. A salt for each pass hides the
answers of others, which n-grams would be copied from.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_settings import parse_overrides, with_overrides
from throughput import machine
from workload import load_prompts

from engine import (
    CacheConfig,
    Completion,
    Engine,
    EngineConfig,
    FinishReason,
    Request,
    SamplingParams,
    ScheduleConfig,
    SpeculationConfig,
    as_token_ids,
)

MODULES = ("textwrap", "shlex", "heapq", "fnmatch", "glob", "calendar", "difflib", "statistics", "ftplib", "csv")
LINES = range(12, 45)
PASSAGE = 110  # words
OFF = "off"


def functions() -> list[tuple[str, str]]:
    """Name and source of one or two functions of some modules of the standard library, of moderate length."""
    found = []
    for module in MODULES:
        text = (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        fitting = [node for node in nodes if (node.end_lineno or 0) - node.lineno in LINES]
        for node in fitting[:1]:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            indent = len(lines[0]) - len(lines[0].lstrip())
            found.append((node.name, "\n".join(line[indent:] for line in lines)))
    return found


def copy_prompts(prose: str) -> list[str]:
    """What a user would ask."""
    edits = [
        f"Rename the function `{name}` to `{name}_v2` and change nothing else. Answer with the whole code.\n\n"
        f"```python\n{source}\n```"
        for name, source in functions()
    ]
    words = prose.split()
    passages = [" ".join(words[at : at + PASSAGE]) for at in range(0, PASSAGE * len(edits), PASSAGE)]
    quotes = [
        f"Quote the sentences of this text that say what happens, word for word and in order.\n\nText: {passage}"
        for passage in passages
    ]
    return [prompt for pair in zip(edits, quotes, strict=False) for prompt in pair]


def make(model: Path, method: str, rows: int, overrides: dict[str, Any]) -> Engine:
    config = EngineConfig(
        dtype="bfloat16",
        max_model_len=2048,
        cache=CacheConfig(memory_bytes=3 << 29),
        schedule=ScheduleConfig(max_num_seqs=rows),
        speculation=SpeculationConfig(method),  # type: ignore[arg-type]
    )
    return Engine.load(model, with_overrides(config, overrides))


def timed(engine: Engine, requests: list[Request]) -> tuple[float, dict[str, Completion]]:
    begun = time.perf_counter()
    done = {completion.request_id: completion for completion in engine.run(requests)}
    return time.perf_counter() - begun, done


def same(ours: dict[str, Completion], theirs: dict[str, Completion]) -> bool:
    return all(ours[k].choices[0].token_ids.tolist() == theirs[k].choices[0].token_ids.tolist() for k in theirs)


def counts(engine: Engine) -> dict[str, Any]:
    """Drafts by source and place."""
    sources = engine.stats().speculation.sources
    return {name: {"drafted": list(of.drafted), "accepted": list(of.accepted)} for name, of in sources.items()}


def copying(args: argparse.Namespace) -> dict[str, Any]:
    from schemas.requests.parsing import ChatMessage
    from workers.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.model)
    prose = (Path(__file__).parent / "workloads" / "prose.txt").read_text(encoding="utf-8")
    texts = [
        tokenizer.render_chat([ChatMessage.model_validate({"role": "user", "content": prompt})])
        for prompt in copy_prompts(prose)
    ]
    ids = tokenizer.encode_chats(texts)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    report: dict[str, Any] = {"requests": len(ids), "prompt_tokens": sum(map(len, ids)), "batches": []}
    for batch in args.batches:
        methods = [OFF, *args.methods]
        engines = {method: make(args.model, method, batch, args.set) for method in methods}
        for engine in engines.values():
            timed(engine, [Request("warm", as_token_ids(ids[0]), replace(params, max_tokens=64), salt=b"warm")])
        seconds = dict.fromkeys(methods, 0.0)
        tokens, ended, equal, ratios = 0, 0, True, []
        for round_ in range(args.rounds):
            for at in range(0, len(ids), batch):
                salt = str(round_).encode()
                requests = [
                    Request(f"{round_}-{at + i}", as_token_ids(prompt), params, salt=salt)
                    for i, prompt in enumerate(ids[at : at + batch])
                ]
                answers, times = {}, {}
                for method in methods if (at // batch) % 2 else methods[::-1]:
                    times[method], answers[method] = timed(engines[method], requests)
                    seconds[method] += times[method]
                tokens += sum(completion.generated_tokens for completion in answers[OFF].values())
                ended += sum(c.choices[0].finish_reason is FinishReason.STOP for c in answers[OFF].values())
                equal &= all(same(answers[method], answers[OFF]) for method in methods)
                ratios.append({method: times[OFF] / times[method] for method in args.methods})
        of_batch: dict[str, Any] = {
            "batch": batch, "output_tokens": tokens, "ended_by_themselves": ended, "equal": equal, "methods": {},
        }  # fmt: skip
        for method in methods:
            of_method = {"seconds": seconds[method], "tokens_per_second": tokens / seconds[method]}
            if method != OFF:
                each = sorted(ratio[method] for ratio in ratios)
                of_method |= {
                    "speedup": seconds[OFF] / seconds[method],
                    "speedup_of_groups": {"min": each[0], "median": statistics.median(each), "max": each[-1]},
                    "drafts": counts(engines[method]),
                }
            of_batch["methods"][method] = of_method
        say(of_batch)
        report["batches"].append(of_batch)
    return report


def tail(args: argparse.Namespace) -> dict[str, Any]:
    prompts = load_prompts(args.workload, args.model)
    engines = {method: make(args.model, method, 128, args.set) for method in (OFF, "auto")}
    rounds = []
    for round_ in range(args.rounds + 1):
        curves, answers = {}, {}
        for method, engine in engines.items():
            salt = str(round_).encode()
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
                engine.add(Request(f"{round_}-{i}", as_token_ids(prompt.token_ids), params, salt=salt))
            curves[method], answers[method] = curve(engine)
        if not round_:
            continue  # warm-up
        whole, left = curves[OFF][-1]
        first = next(tokens for at, tokens in curves[OFF] if at >= 0.9 * whole)
        lasts = {method: points[-1][0] - reached(points, first) for method, points in curves.items()}
        found = {
            "seconds": {method: points[-1][0] for method, points in curves.items()},
            "output_tokens": left,
            "last_tokens": left - first,
            "seconds_of_last_tokens": lasts,
            "tail_shrinks_to": lasts["auto"] / lasts[OFF],
            "equal": same(answers["auto"], answers[OFF]),
        }
        say(found)
        rounds.append(found)
    return {"rounds": rounds, "drafts": counts(engines["auto"])}


def curve(engine: Engine) -> tuple[list[tuple[float, int]], dict[str, Completion]]:
    """After each step: seconds since the first, and tokens sampled; and all answers."""
    engine.settle(more_to_come=False)
    begun, before, done, points = time.perf_counter(), engine.stats().generated, {}, []
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
        points.append((time.perf_counter() - begun, engine.stats().generated - before))
    return points, done


def reached(points: list[tuple[float, int]], tokens: int) -> float:
    return next(at for at, sampled in points if sampled >= tokens)


def full(args: argparse.Namespace) -> dict[str, Any]:
    prompts = load_prompts(args.workload, args.model)[:128]
    engines = {method: make(args.model, method, 128, args.set) for method in (OFF, "auto")}
    for engine in engines.values():
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=args.steps + 64, temperature=0.0, ignore_eos=True)
            engine.add(Request(str(i), as_token_ids(prompt.token_ids[:256]), params))
        engine.settle(more_to_come=False)
        while engine.num_waiting or engine.stats().generated < 3 * len(prompts):
            engine.step()
    pairs = []
    for step in range(args.steps):
        times = {}
        for method in (OFF, "auto") if step % 2 else ("auto", OFF):
            begun = time.perf_counter()
            engines[method].step()
            times[method] = time.perf_counter() - begun
        pairs.append(times)
    assert all(engine.num_running == len(prompts) for engine in engines.values())
    found = {
        "rows": len(prompts),
        "steps": args.steps,
        "median_step_seconds": {m: statistics.median(pair[m] for pair in pairs) for m in engines},
        "auto_takes": {
            "of_medians": statistics.median(p["auto"] for p in pairs) / statistics.median(p[OFF] for p in pairs),
            "median_of_pairs": statistics.median(pair["auto"] / pair[OFF] for pair in pairs),
        },
        "drafts": counts(engines["auto"]),
    }
    say(found)
    return found


def say(found: dict[str, Any]) -> None:
    print(json.dumps(found), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"copy": copying, "tail": tail, "full": full}
    commands = parser.add_subparsers(dest="part", required=True)
    for name in parts:
        command = commands.add_parser(name)
        if name != "copy":
            command.add_argument("workload", type=Path)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--set", type=parse_overrides, default={}, help="key:value,… of EngineConfig")
        command.add_argument("--json", type=Path, default=None)
        command.add_argument("--rounds", type=int, default=1 if name == "copy" else 3)
        command.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
        command.add_argument("--methods", type=lambda text: text.split(","), default=["ngram", "auto"])
        command.add_argument("--max-tokens", type=int, default=400)
        command.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    settings = {"model": args.model.name, "part": args.part, "set": args.set}
    report = {"machine": machine(), "settings": settings, **parts[args.part](args)}
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
