"""Somebody who reads along beside batch work: times to first tokens and between tokens, and what batch work loses.

    python benchmarks/interactive.py benchmarks/workloads/mixed.jsonl --model MODEL [--requests 300] [--rate 3]
        [--ttft 0.4] [--itl 0.03] [--runs 3] [--json FILE]

One engine at a time. Its batch is full of bulk rows, and more of them wait; requests of class 0 come at random times (a
Poisson process with a fixed seed), each with a prompt and a length of the workload's. A request's time to its first
token begins when it comes, which most often is in the middle of a step; times between tokens are those at which they
could be emitted.

idle      no bulk work.
none      bulk work, and requests are of its class: they queue behind it.
first     requests go first, and nothing is held back for them.
paced     promises are kept (`engine.scheduler.slo_control`), `--runs` times.
fixed:N   other classes have N tokens of each step beside requests: the static shares that `paced` is compared with.

With `--check` it ends with 1 where a claim doesn't hold: `broken_claims`. `interactive_chart.py` draws what was found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_settings import parse_overrides, with_overrides
from throughput import machine
from workload import Prompt, load_prompts

from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from engine.config import SloConfig

BULK_WAITING = 64
LONGEST = 48  # tokens of an answer that somebody reads
LEAST_BULK = 64  # rows that count as a full batch
SWEEP = (8, 16, 24, 32, 40, 48, 64)
WARM_UP = 12.0  # seconds


@dataclass
class Reader:
    """A request of class 0, and when its tokens came; seconds.

    Attributes:
        behind: a step without it computed the prompt of another.
    """

    request: Request
    due: float
    step: int = 0
    given: int = 0
    last: float = 0.0
    first: float | None = None
    steps_to_row: int | None = None
    behind: bool = False
    gaps: list[float] = field(default_factory=list)

    def see(self, tokens: int, now: float) -> None:
        """So many tokens are there now."""
        if tokens <= self.given:
            return
        if self.first is None:
            self.first = now - self.due
        else:
            self.gaps.append(now - self.last)
        self.given, self.last = tokens, now


class EngineUnderLoad:
    """An engine with bulk work, and readers who come."""

    def __init__(self, engine: Engine, prompts: list[Prompt], bulk: bool, priority: int) -> None:
        self.engine = engine
        self.priority = priority
        self.bulk_tokens = 0
        self._bulk = cycle(prompts) if bulk else None
        self._bulk_open: dict[str, Request] = {}
        self._bulk_given: dict[str, int] = {}
        self._serial = 0
        self.steps = 0

    def fill(self) -> None:
        """Keep bulk work waiting."""
        while self._bulk is not None and self.engine.num_waiting < BULK_WAITING:
            prompt = next(self._bulk)
            self._serial += 1
            params = SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True)
            request = Request(
                f"bulk{self._serial}",
                as_token_ids(prompt.token_ids),
                params,
                priority=2,
                salt=str(self._serial).encode(),
            )
            self.engine.add(request)

    def step(self, readers: dict[str, Reader]) -> list[str]:
        """One step; the readers whose answers have ended."""
        before = {name for name, reader in readers.items() if reader.steps_to_row is None}
        beginning = {name for name, reader in readers.items() if reader.first is None}
        generated = self.engine.stats().generated
        ended = []
        completions = self.engine.step()
        self.steps += 1
        now = self.engine.clock()
        emitted = 0
        for completion in completions:
            reader = readers.get(completion.request_id)
            if reader is not None:
                tokens = len(completion.choices[0].token_ids)
                emitted += tokens - reader.given
                reader.see(tokens, now)
                ended.append(completion.request_id)
        for reader in readers.values():
            for choice in self.engine.partial(reader.request):
                emitted += len(choice.token_ids) - reader.given
                reader.see(len(choice.token_ids), now)
        for name in before:
            if self._has_row(name):
                readers[name].steps_to_row = self.steps - readers[name].step
            else:
                readers[name].behind = any(self._has_row(other) for other in beginning - {name})
        self.bulk_tokens += self.engine.stats().generated - generated - emitted
        return ended

    def _has_row(self, name: str) -> bool:
        owners = self.engine.scheduler._batch.owners  # else a row without a token can't be seen
        return any(owner is not None and owner.request.request_id == name for owner in owners) or (
            not self.engine.scheduler.sampled(name)
        )


def serve(
    engine: Engine, prompts: list[Prompt], args: argparse.Namespace, *, bulk: bool, priority: int
) -> dict[str, Any]:
    """Let all readers come and be served; what they saw."""
    loaded = EngineUnderLoad(engine, prompts, bulk, priority)
    begun = engine.clock()
    while engine.clock() - begun < (WARM_UP if bulk else 1.0):
        loaded.fill()
        if engine.has_work:
            loaded.step({})
        else:
            time.sleep(0.01)
    running = engine.num_running
    random, at = Random(7), engine.clock()
    coming: deque[tuple[float, Prompt]] = deque()
    for number in range(args.requests):
        at += random.expovariate(args.rate)
        coming.append((at, prompts[number * 37 % len(prompts)]))
    readers: dict[str, Reader] = {}
    done: list[Reader] = []
    loaded.bulk_tokens, start = 0, engine.clock()
    serial = 0
    while coming or readers:
        now = engine.clock()
        if now - start > args.give_up:
            break
        while coming and coming[0][0] <= now:
            due, prompt = coming.popleft()
            serial += 1
            name = f"reader{serial}"
            params = SamplingParams(max_tokens=min(prompt.max_tokens, LONGEST), ignore_eos=True)
            request = Request(name, as_token_ids(prompt.token_ids), params, priority=priority, salt=name.encode())
            engine.add(request)
            readers[name] = Reader(request, due, loaded.steps)
        loaded.fill()
        if not engine.has_work:
            time.sleep(max(0.0, min(0.01, coming[0][0] - now)) if coming else 0)
            continue
        done += [readers.pop(name) for name in loaded.step(readers)]
    seconds = engine.clock() - start
    return report(done, len(readers) + len(coming), seconds, loaded.bulk_tokens, running, engine)


def report(done: list[Reader], left: int, seconds: float, bulk: int, running: int, engine: Engine) -> dict[str, Any]:
    """What the readers saw."""
    firsts = [reader.first for reader in done if reader.first is not None]
    gaps = [gap for reader in done for gap in reader.gaps]
    rows = [reader.steps_to_row for reader in done if reader.steps_to_row is not None]
    later = [reader for reader in done if reader.steps_to_row != 1]
    pace = engine.stats().slo
    facts = None if pace is None else {"utilisation": pace.utilisation, "objective": pace.objective}
    return {
        "answered": len(done), "left": left, "seconds": seconds, "bulk_rows_at_the_start": running,
        "bulk_tokens_per_second": bulk / seconds,
        "steps_to_row": {
            "worst": max(rows), "mean": statistics.fmean(rows), "later_than_the_next": len(later),
            "of_them_behind_another_prompt": sum(reader.behind for reader in later),
        },
        "ttft": quantiles(firsts), "itl": quantiles(gaps), "preemptions": engine.stats().preemptions, "pace": facts,
    }  # fmt: skip


def broken_claims(found: list[dict[str, Any]], ttft: float, itl: float) -> list[str]:
    """What these runs show to be untrue, in words:

    - a batch full of bulk rows breaks both promises where nothing is done for readers, or nothing is shown here;
    - whatever comes is admitted with the next step, unless that computes the prompt of somebody who came before;
    - `paced` keeps both promises for 95 % in each of its runs, with at least 85 % of the bulk tokens that the best
      static share gives which keeps them.
    """
    broken = []
    kept = [run for run in found if run["ttft"]["p95"] <= ttft and run["itl"]["p95"] <= itl]
    paced = [run for run in found if run["name"] == "paced"]
    best = max((run["bulk_tokens_per_second"] for run in kept if run["name"].startswith("fixed")), default=0.0)
    for run in found:
        if run["name"] in ("none", "first") and run in kept:
            broken.append(f"{run['name']} keeps the promises: there is nothing to hold back")
        rows = run["steps_to_row"]
        if run["name"] != "none" and rows["later_than_the_next"] > rows["of_them_behind_another_prompt"]:
            broken.append(f"{run['name']}: somebody was admitted later than with the next step: {rows}")
        if run["name"] != "idle" and run["bulk_rows_at_the_start"] < LEAST_BULK:
            broken.append(f"{run['name']}: the batch was not full of bulk rows")
        if run["left"]:
            broken.append(f"{run['name']}: {run['left']} were not answered in time")
    for run in paced:
        if run not in kept:
            broken.append(f"paced: p95 {run['ttft']['p95']:.3f} and {run['itl']['p95']:.4f} s")
        if run["bulk_tokens_per_second"] < 0.85 * best:
            broken.append(f"paced: {run['bulk_tokens_per_second']:.0f} bulk tokens/s of {best:.0f}")
    return broken


def quantiles(samples: list[float]) -> dict[str, float]:
    """p50, p95 and p99; seconds."""
    ordered = sorted(samples)
    return {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--set", default="threads:2,quantize:dense", help="the engine's settings")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--rows", type=int, default=72, help="of the running batch")
    parser.add_argument("--ttft", type=float, default=0.4)
    parser.add_argument("--itl", type=float, default=0.03)
    parser.add_argument("--quantile", type=float, default=0.97, help="of the tokens, that are promised to be in time")
    parser.add_argument("--runs", type=int, default=3, help="of `paced`")
    parser.add_argument("--only", default="idle,none,first,paced,sweep")
    parser.add_argument("--give-up", type=float, default=400.0, help="seconds after which a run ends")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="end with 1 where a claim doesn't hold")
    args = parser.parse_args()
    prompts = load_prompts(args.workload, args.model)
    base = EngineConfig(
        cache=CacheConfig(memory_bytes=2 << 30), schedule=ScheduleConfig(args.rows, 2048), max_model_len=2048
    )
    base = with_overrides(base, parse_overrides(args.set))
    promise = SloConfig(ttft_seconds=args.ttft, itl_seconds=args.itl, quantile=args.quantile)
    only = args.only.split(",")
    plans: list[tuple[str, SloConfig | None, bool, int]] = []
    if "idle" in only:
        plans.append(("idle", None, False, 0))
    if "none" in only:
        plans.append(("none", None, True, 2))
    if "first" in only:
        plans.append(("first", None, True, 0))
    if "paced" in only:
        plans += [("paced", promise, True, 0)] * args.runs
    if "sweep" in only:
        plans += [(f"fixed:{tokens}", replace(promise, fixed_tokens=tokens), True, 0) for tokens in SWEEP]
    found: list[dict[str, Any]] = []
    for name, pace, bulk, priority in plans:
        config = replace(base, schedule=replace(base.schedule, slo=pace))
        engine = Engine.load(args.model, config)
        seen = {"name": name, **serve(engine, prompts, args, bulk=bulk, priority=priority)}
        del engine
        found.append(seen)
        print(
            f"{name:9} ttft p50 {seen['ttft']['p50']:.3f} p95 {seen['ttft']['p95']:.3f} p99 {seen['ttft']['p99']:.3f}  "
            f"itl p50 {seen['itl']['p50']:.4f} p95 {seen['itl']['p95']:.4f} p99 {seen['itl']['p99']:.4f}  "
            f"bulk {seen['bulk_tokens_per_second']:.0f} tok/s  row after {seen['steps_to_row']['worst']} steps  "
            f"left {seen['left']}",
            flush=True,
        )
    if args.json:
        facts = {
            "machine": machine(),
            "settings": {"workload": args.workload.name, "model": args.model.name, "set": args.set, "rows": args.rows,
                         "requests": args.requests, "rate": args.rate, "ttft": args.ttft, "itl": args.itl,
                         "quantile": args.quantile},
            "runs": found,
        }  # fmt: skip
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    broken = broken_claims(found, args.ttft, args.itl)
    print(*broken or ["all claims hold"], sep="\n")
    return 1 if args.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
