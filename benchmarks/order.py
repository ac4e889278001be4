"""The planner's order against the order of arrival: the same requests, through the same worker and engine, in turn.

    python benchmarks/order.py benchmarks/workloads/varied.jsonl --model MODEL [--pairs 3] [--set …] [--json FILE]

The workload is submitted and planned as `tokenmill run` does it, and the planned shards go to a `ShardWorker`, whose
results stay in memory. For the order of arrival the same rows go to it sorted by line, without what the planner found
out of prefixes, and the engine is not told that the last row has come: all that a server would know is the requests so
far. Each run has an engine of its own, loaded and warmed before the clock starts. `--null` takes the
model away: the hits, the computed tokens and the rows a step are then right, times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow as pa
import pyarrow.parquet as pq
from engine_settings import SettingError, parse_overrides, with_overrides
from pipeline_cost import warm, write_input
from shared_prefix import best_hits
from step_record import StepRecord, StepRecorder, occupancy
from throughput import machine
from workload import load_prompts

from engine import Engine, EngineConfig
from engine.groups import GroupEngine
from engine.models.load import describe_model
from pipeline.adapters.system_clock import SystemClock
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.records import ShardReport
from pipeline.worker_client.ports import CheckpointWork, RevokedShards, ShardWork, WorkerLoad
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Job, JobSettings, Tier
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel, token_counter
from tokenmill.local.embedded import open_output
from tokenmill.local.run_job import pin_model
from tokenmill.local.run_plan import rows_at_once, sequences, tokens_per_sequence
from tokenmill.models.sources import ModelSource
from tokenmill.processes.logging import log_to_stderr
from workers.model.loaded_model import LoadedModel
from workers.shards.shard_reader import HINTS
from workers.shards.worker import ShardWorker
from workers.text.chat_options import OWN_CHAT

RunOrder = Literal["plan", "arrival"]


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job as the planner left it.

    Attributes:
        shards: their tables, in running order.
        config: of the engine, with a cache for this work.
    """

    job: Job
    pin: ModelPin
    shards: tuple[pa.Table, ...]
    config: EngineConfig


def plan_workload(
    workload: Path, model: Path, folder: Path, overrides: dict[str, Any], limit: int | None = None
) -> PlannedJob:
    """Submit and plan the workload in `folder`, as the command line would, its first `limit` lines or all; the engine's
    settings with `overrides`."""
    source = folder / "requests.jsonl"
    write_input(workload, source)
    pinned = ("dtype", "quantize", "kv_dtype")  # what a job is pinned to
    options = EngineOptions(**{name: overrides[name] for name in pinned if name in overrides})
    pin = pin_model(ChosenModel("model", ModelSource("model", model.resolve(), None, 0)), model, options, OWN_CHAT)
    order = JobOrder(input=pin_input(source), models=(pin,), settings=JobSettings(limit=limit), tier=Tier.STANDARD)
    with open_output(folder / "out") as output:
        job = submit(order, output.ledger, output.world).job
        plan_job(output.ledger, job, output.world, token_counter(model))
        segments = list(output.ledger.segments())
        tables = tuple(
            pq.read_table(pa.BufferReader(output.ledger.read_shard(shard)))
            for segment in segments
            for shard in segment.shards
        )
        if refused := sum(segment.rejected for segment in segments):
            raise SystemExit(f"error: the planner refuses {refused} lines of {workload}")
    config = options.config(tokens_per_sequence(segments), sequences(segments), rows_at_once(segments))
    return PlannedJob(job, pin, tables, with_overrides(config, overrides))


def by_arrival(shards: Sequence[pa.Table]) -> tuple[pa.Table, ...]:
    """The rows sorted by line, in as many tables, without what may be unknown of their prefixes."""
    table = pa.concat_tables(shards).sort_by("row")
    for name in HINTS:
        field = table.schema.field(name)
        if field.nullable:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, field, pa.nulls(len(table), field.type))
    size = -(-len(table) // len(shards))
    return tuple(table.slice(at, size) for at in range(0, len(table), size))


class Shards:
    """`ShardSource` and `ShardSink` in memory, for one run."""

    def __init__(self, planned: PlannedJob, tables: Sequence[pa.Table]) -> None:
        self._clock = SystemClock()
        self._planned = planned
        self._tables = list(enumerate(tables))
        self.finished_rows: list[FinishedRows] = []

    def take(self, timeout: float, tiers: Sequence[Tier] = ()) -> ShardWork | None:
        if not self._tables:
            return None
        number, table = self._tables.pop(0)
        return ShardWork(self._planned.job, number, 1, f"attempt-{number}", table, self._clock.now())

    def finished(self) -> bool:
        return not self._tables

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        self.finished_rows.append(finished)
        return True

    def begin(self, work: ShardWork) -> None: ...

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None: ...

    def record(self, work: ShardWork, rows: Sequence[int]) -> None: ...

    def release(self, work: ShardWork, generated: int, busy_seconds: float) -> None: ...

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None: ...

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad) -> None: ...

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        return RevokedShards()


def load(planned: PlannedJob, *, null: bool) -> LoadedModel:
    """The job's model with a fresh engine, warm; or the real tokenizer with an engine whose steps cost nothing."""
    path = Path(planned.pin.source)
    if not null:
        model = LoadedModel.load(path, name="model", config=planned.config, digest=planned.pin.digest)
        warm(model)
        return model
    longest = describe_model(path).spec.max_position
    length = planned.config.cache.tokens_per_sequence or longest
    schedule, size = planned.config.schedule, planned.config.cache.block_tokens
    blocks = max(-(-longest // size), schedule.rows * length * 5 // (4 * size)) + 1
    return LoadedModel.without_weights(
        path, name="model", config=planned.config, num_blocks=blocks, digest=planned.pin.digest
    )


def run(
    planned: PlannedJob, order: RunOrder, best: int, *, null: bool = False
) -> tuple[dict[str, Any], list[StepRecord]]:
    """One run, and its steps. `best`: prompt tokens that could be taken from the cache at most."""
    model = load(planned, null=null)
    assert isinstance(model.engine, GroupEngine)
    engine = model.engine.engine
    assert isinstance(engine, Engine)
    recorder, before = StepRecorder.attach(engine), engine.stats()
    tables = planned.shards if order == "plan" else by_arrival(planned.shards)
    if order == "arrival":  # the next request may always come
        engine.settle = lambda *, more_to_come: None  # type: ignore[method-assign]
    shards = Shards(planned, tables)
    ShardWorker(model, shards, shards, SystemClock()).run()
    steps, stats = recorder.take(), engine.stats()
    table = pa.concat_tables(finished.table() for finished in shards.finished_rows)
    if failed := [row["error_message"] for row in table.to_pylist() if row["status"] != "succeeded"]:
        raise SystemExit(f"error: {len(failed)} of {len(table)} rows failed, the first with: {failed[0]}")
    seconds = steps[-1].ended - steps[0].begun
    output, cached = sum(table["completion_tokens"].to_pylist()), sum(table["cached_tokens"].to_pylist())
    facts = {
        "order": order,
        "seconds": seconds,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        **asdict(occupancy(steps, planned.config.schedule.rows, steps[-1].ended)),
        "prompt_tokens": sum(table["prompt_tokens"].to_pylist()),
        "cached_tokens": cached,
        "best_cached_tokens": best,
        "share_of_best": cached / best if best else 1.0,
        "computed_tokens": stats.computed - before.computed,
        "recomputed_tokens": stats.recomputed - before.recomputed,
        "preemptions": stats.preemptions - before.preemptions,
        "steps": len(steps),
    }
    return facts, steps


def say(facts: dict[str, Any], name: str) -> None:
    print(
        f"{name} {facts['order']:7} {facts['seconds']:7.1f} s, {facts['output_tokens_per_second']:7.1f} output tok/s, "
        f"{facts['mean_rows']:5.1f} rows, tail {facts['tail_share']:5.1%}, hits {facts['cached_tokens']} of "
        f"{facts['best_cached_tokens']} ({facts['share_of_best']:.1%}), {facts['computed_tokens']} computed, "
        f"{facts['preemptions']} preemptions",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--set", default="", dest="overrides", help="engine settings: key:value,key:value")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=None, help="first N requests only")
    parser.add_argument("--null", action="store_true", help="no model: order, hits and steps alone")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    log_to_stderr()
    with tempfile.TemporaryDirectory(prefix="order-") as folder:
        try:
            planned = plan_workload(
                args.workload, args.model, Path(folder), parse_overrides(args.overrides), args.limit
            )
        except SettingError as error:
            raise SystemExit(f"error: {error}") from error
    prompts = [prompt.token_ids for prompt in load_prompts(args.workload, args.model, args.limit)]
    best = best_hits(prompts, planned.config.cache.block_tokens)
    pairs: list[dict[RunOrder, dict[str, Any]]] = []
    for i in range(args.pairs):
        pair: dict[RunOrder, dict[str, Any]] = {}
        orders: list[RunOrder] = ["plan", "arrival"]
        for order in orders if i % 2 == 0 else reversed(orders):
            pair[order], _ = run(planned, order, best, null=args.null)
            say(pair[order], f"pair {i}")
        pairs.append(pair)
    ratios = [p["plan"]["output_tokens_per_second"] / p["arrival"]["output_tokens_per_second"] for p in pairs]
    report = {
        "workload": args.workload.name,
        "model": args.model.name,
        "null": args.null,
        "settings": asdict(planned.config),
        "machine": machine(),
        "shards": len(planned.shards),
        "best_cached_tokens_without_blocks": best_hits(prompts, 1),
        "plan_over_arrival": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "pairs": pairs,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: report[key] for key in ("workload", "null", "plan_over_arrival")}))


if __name__ == "__main__":
    main()
