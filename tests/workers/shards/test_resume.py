"""Workers that die, again and again: the next one goes on where the log stands, and the results are those of a run that
nothing interrupted. The engine, the ledger and the log's bytes are the real ones; a death is an exception that the
worker does not catch."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.config import CacheConfig, EngineConfig, ScheduleConfig
from engine.groups import ended_choice
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.jobs.summaries import summarize_job
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.results.shard_history import read_history
from pipeline.worker_client.ports import ShardWork
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.outcome import Manifest
from schemas.models import ModelPin
from schemas.requests.limits import PlanSettings
from tests.pipeline.simulated_harness import LIFETIME, PipelineHarness
from tests.pipeline.simulation import MemoryStore, simulated_world
from workers.errors import BrokenEngineError
from workers.model.loaded_model import LoadedModel
from workers.observability.progress import WorkerProgress
from workers.settings import WorkerSettings
from workers.shards.resume import resume_from
from workers.shards.shard_reader import ShardReader
from workers.shards.worker import ShardWorker

ROWS = 24
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.2, "top_p": 0.9, "n": 3, "stop": ["e", "q", "th"]},
    {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 6},
    {"temperature": 0, "stop": ["zq", "xx"], "n": 2, "logprobs": True},
    {"temperature": 1.0, "top_k": 9, "presence_penalty": 0.3, "logprobs": True, "top_logprobs": 0, "n": 2},
]


class ProcessKilled(BaseException):
    """The death of the process."""


class KillingObserver:
    """A worker's observer that kills it after some iterations."""

    def __init__(self, iterations: float) -> None:
        self._left = iterations

    def progress(self, progress: WorkerProgress) -> None:
        self._left -= 1
        if self._left <= 0 and not progress.stopped:
            raise ProcessKilled


class DispatchingSource:
    """A shard source whose dispatcher polls before each take."""

    def __init__(self, harness: PipelineHarness, name: str) -> None:
        self._harness = harness
        self._client = harness.client(name)

    def take(self, timeout: float, tiers: Sequence[Tier] = ()) -> ShardWork | None:
        self._harness.dispatcher.tick()
        return self._client.take(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.fixture
def requests(tmp_path: Path, kit: Any) -> Path:
    """24 requests of all kinds, four of them copies of others."""
    lines = []
    for row in range(ROWS):
        at = row % 20
        body = kit.chat(f"tell me {at}", max_tokens=20 + at, **KINDS[at % len(KINDS)])
        if at % 7 == 3:
            body = kit.completion(f"once {at}", max_tokens=16, echo=True, logprobs=1, temperature=0.7, seed=at)
        if at % 7 == 5:
            prompts = [f"first {at}", [5, 6, 7 + at], "third"]
            body = kit.completion(prompts, max_tokens=18, n=2, logprobs=1, temperature=0.9, stop=["e", "th"])
        url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        lines.append(json.dumps({"custom_id": f"id-{row}", "method": "POST", "url": url, "body": body}))
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def load(model_folder: Path) -> Callable[[], LoadedModel]:
    config = EngineConfig(
        dtype="float32", max_model_len=256, cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=8)
    )
    return lambda: LoadedModel.load(model_folder, name="tiny", config=config, digest="sha256:1")


def begin(tmp_path: Path, source: Path, name: str, max_tries: int | None = None) -> World:
    """A planned job in a world of its own."""
    scratch = tmp_path / name
    scratch.mkdir()
    world = simulated_world(scratch)
    ledger = JobLedger(world.store)
    settings = JobSettings(plan=PlanSettings(max_shard_rows=7), max_tries=max_tries)
    pin = ModelPin(name="tiny", source="tiny", digest="sha256:1", dtype="float32")
    job = submit(JobOrder(input=pin_input(source), models=(pin,), settings=settings), ledger, world, job_id="job-1").job
    plan_job(ledger, job, world)
    return world


def work_on(world: World, model: LoadedModel, iterations: float, kit: Any, **settings: Any) -> Manifest | None:
    """Run one worker until the job ends, or until it dies after so many iterations. At the end its progress has
    each row that was not committed before."""
    harness = PipelineHarness(world, JobLedger(world.store))
    summary = summarize_job(harness.ledger)
    assert summary.counts is not None
    harness.dispatcher.add(harness.ledger)
    source = DispatchingSource(harness, "w")
    how = WorkerSettings(report_interval_seconds=0, **{"checkpoint_seconds": 0, "max_open_shards": 2} | settings)
    worker = ShardWorker(model, source, source, world.clock, how, KillingObserver(iterations), kit.InlineExecutor())  # type: ignore[arg-type]
    try:
        progress = worker.run()
    except ProcessKilled:
        return None
    assert progress.rows + progress.counts.restored == summary.counts.pending
    for _ in range(3):
        world.clock.sleep(LIFETIME + 1)
        harness.dispatcher.tick()
    return harness.ledger.manifest()


def rows_of(world: World) -> list[dict[str, Any]]:
    """The results without the fields that may differ: times, attempts, cached tokens."""
    found = []
    for _, info in JobLedger(world.store).parts():
        for row in pq.read_table(pa.BufferReader(world.store.read(info.key))).to_pylist():
            response = json.loads(row["response"])
            del response["usage"]["prompt_tokens_details"], response["created"]
            found.append((row["row"], row["custom_id"], row["status"], row["text"], rounded(response)))
    return sorted(found, key=lambda row: row[0])


def rounded(value: Any) -> Any:
    """Log-probabilities differ in their last digits with the shape of the batch."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.slow
def test_given_deaths_at_any_moment_when_workers_resume_then_results_are_those_of_an_unbroken_run(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    unbroken = begin(tmp_path, requests, "unbroken")
    whole = work_on(unbroken, load(), float("inf"), kit)
    assert whole is not None
    assert whole.counts.succeeded == ROWS
    assert whole.usage.repeated == whole.repeated_at_most == 0

    broken, chance, lives = begin(tmp_path, requests, "broken"), random.Random(2), 0
    while (manifest := work_on(broken, load(), chance.randrange(3, 25), kit)) is None:
        lives += 1
        assert lives < 200, "the job gets nowhere"

    assert lives > 3
    assert rows_of(broken) == rows_of(unbroken)
    assert manifest.usage.completion == whole.usage.completion
    assert manifest.usage.repeated == 0, "all was logged after each step, so nothing was sampled twice"
    assert manifest.repeated_at_most <= lives * 8 * 3
    left = [info.key for info in broken.store.list("work/")]
    assert not [key for key in left if key.endswith(tuple("0123456789"))], "checkpoints are removed with the commit"


@pytest.mark.slow
def test_given_deaths_in_the_middle_of_tries_when_workers_resume_then_no_logged_try_is_made_again(
    tmp_path: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    source, rows = tmp_path / "in.jsonl", 12
    bodies = [kit.chat(f"tell me {row % 10}", max_tokens=5, temperature=1.0, seed=row % 10) for row in range(rows)]
    lines = [
        {"custom_id": f"id-{n}", "method": "POST", "url": "/v1/chat/completions", "body": bodies[n]}
        for n in range(rows)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged: Counter[tuple[int, str]] = Counter()

    def check(row: int, text: str) -> str | None:
        judged[row, text] += 1
        return None if zlib.crc32(text.encode()) % 3 == row % 3 else "no"

    unbroken = begin(tmp_path, source, "unbroken", max_tries=3)
    whole = work_on(unbroken, load(), float("inf"), kit, check=check)
    assert whole is not None
    tries = {row["row"]: row["tries"] for row in rows_with_errors(unbroken)}
    assert set(tries.values()) == {1, 2, 3}
    once, judged = judged.copy(), Counter()

    broken, chance, lives = begin(tmp_path, source, "broken", max_tries=3), random.Random(3), 0
    while (manifest := work_on(broken, load(), chance.randrange(2, 7), kit, check=check)) is None:
        lives += 1
        assert lives < 100, "the job gets nowhere"

    assert lives > 3
    assert judged == once, "each answer is judged once, so no try is made again"
    assert manifest.usage.repeated == 0
    columns = ("row", "status", "text", "error_message", "tries", "prompt_tokens", "completion_tokens")
    assert [[row[name] for name in columns] for row in rows_with_errors(broken)] == [
        [row[name] for name in columns] for row in rows_with_errors(unbroken)
    ]
    for world, ended in ((unbroken, whole), (broken, manifest)):
        computed = [row for row in rows_with_errors(world) if row["row"] < 10]
        assert sum(row["completion_tokens"] for row in computed) == ended.usage.completion
        assert sum(row["prompt_tokens"] for row in computed) == ended.usage.prompt


@pytest.mark.exhaustive
def test_given_rare_checkpoints_when_workers_die_then_only_unlogged_tokens_are_computed_again(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    unbroken, broken = begin(tmp_path, requests, "unbroken"), begin(tmp_path, requests, "broken")
    whole = work_on(unbroken, load(), float("inf"), kit)
    assert whole is not None
    sampled = 0
    for iterations in (9, 14, float("inf")):
        model = load()
        # The clock stands still while the engine computes: only the first step of each life is logged.
        manifest = work_on(broken, model, iterations, kit, checkpoint_seconds=1e9)
        sampled += model.engine.stats().generated

    assert manifest is not None
    assert rows_of(broken) == rows_of(unbroken)
    lost = sampled - manifest.usage.completion
    assert manifest.usage.repeated <= lost <= manifest.repeated_at_most
    assert lost > 50


@pytest.mark.slow
def test_given_damaged_or_lost_checkpoints_when_resuming_then_their_rows_are_computed_again(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    unbroken, broken = begin(tmp_path, requests, "unbroken"), begin(tmp_path, requests, "broken")
    assert work_on(unbroken, load(), float("inf"), kit) is not None
    assert work_on(broken, load(), 14, kit) is None
    store = broken.store
    assert isinstance(store, MemoryStore)
    keys = [key for key in store.objects if key.startswith("work/") and not key.endswith(".json")]
    assert len(keys) > 9
    for at, key in enumerate(keys):
        if at % 5 == 1:
            del store.objects[key]
        elif at % 5 == 3:
            store.objects[key] = store.objects[key][:-7]
        elif at == 5:
            store.objects[key] = b"tmckpt99" + store.objects[key][8:]

    assert work_on(broken, load(), float("inf"), kit) is not None
    assert rows_of(broken) == rows_of(unbroken)


@pytest.mark.slow
def test_given_a_stop_when_it_comes_then_everything_is_logged_and_nothing_counts_as_lost(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    unbroken, broken = begin(tmp_path, requests, "unbroken"), begin(tmp_path, requests, "broken")
    whole = work_on(unbroken, load(), float("inf"), kit)
    assert whole is not None

    class StopAfter:
        """Set after this many polls by the worker."""

        def __init__(self, polls: int) -> None:
            self.left = polls

        def is_set(self) -> bool:
            self.left -= 1
            return self.left < 0

    for polls in (6, 9, 12):
        harness = PipelineHarness(broken, JobLedger(broken.store))
        harness.dispatcher.add(harness.ledger)
        source: Any = DispatchingSource(harness, "w")
        model = load()
        how = WorkerSettings(checkpoint_seconds=1e9, max_open_shards=2)
        worker = ShardWorker(model, source, source, broken.clock, how, helper=kit.InlineExecutor())
        progress = worker.run(StopAfter(polls))  # type: ignore[arg-type]
        assert progress.stopped
        assert not model.engine.has_work
    manifest = work_on(broken, load(), float("inf"), kit)

    assert manifest is not None
    assert rows_of(broken) == rows_of(unbroken)
    assert manifest.usage.repeated == manifest.repeated_at_most == 0
    assert manifest.usage.completion == whole.usage.completion


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 10)), 22])
def test_given_a_row_that_kills_its_worker_when_tried_again_then_it_alone_fails(
    tokens: int, tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    # Given steps of 50 ms, a log each second, and a row that ends the process at its `tokens`th token
    world = begin(tmp_path, requests, "world")
    poison, lives = 19, 0
    manifest = None
    while manifest is None:
        lives += 1
        assert lives < 15, "the poison is never found"
        model = poisoned(load(), poison, tokens, world)
        manifest = work_on(world, model, float("inf"), kit, checkpoint_seconds=1.0)

    failed = [row for row in rows_with_errors(world) if row["status"] == "failed"]
    assert [(row["row"], row["error_code"]) for row in failed] == [(poison, "engine_error")]
    assert "died 3 times" in failed[0]["error_message"]
    assert manifest.counts.succeeded == ROWS - 1
    assert lives <= 13, "three shards die together, and each is suspected"


def poisoned(model: LoadedModel, poison: int, tokens: int, world: World) -> LoadedModel:
    """The process dies at the `tokens`th token of the row."""
    add, step, since = model.engine.add, model.engine.step, list[int]()

    def recording_add(request: Any) -> None:
        if request.request_id.endswith(f"/{poison}"):
            since.append(sum(len(choice.token_ids) for choice in request.partial))
        add(request)

    def dying_step() -> Any:
        world.clock.sleep(0.05)
        if since:
            since[0] += 1
            if since[0] >= tokens:
                raise ProcessKilled
        return step()

    return replace(model, engine=WrappedEngine(model.engine, recording_add, dying_step))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "interval"),
    [
        (0.75, 15.0),
        (4.2, 1.0),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in ((0.75, 1.0), (4.2, 15.0), *product((0.2, 2.1, 8.2), (1.0, 15.0)))
        ),
    ],
)
def test_given_workers_that_are_killed_a_while_after_their_start_then_no_row_is_blamed(
    seconds: float, interval: float, tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    # Given slow steps, so that hardly anything is done in a life, and 14 lives of the same length
    world = begin(tmp_path, requests, "world")
    model = load()
    for _ in range(14):
        killed = killed_after(replace(model, engine=model.engine), seconds, world)
        if work_on(world, killed, float("inf"), kit, checkpoint_seconds=interval) is not None:
            break  # long lives get done
        model = load()
    # When they are no longer killed, then all rows are answered
    manifest = work_on(world, model, float("inf"), kit, checkpoint_seconds=interval)
    assert manifest is not None
    assert {row["error_code"] for row in rows_with_errors(world)} == {None}
    assert manifest.counts.succeeded == ROWS


def killed_after(model: LoadedModel, seconds: float, world: World) -> LoadedModel:
    """The process dies so long after its first step; a step takes 0.3 s."""
    step, since = model.engine.step, list[float]()

    def dying_step() -> Any:
        since.append(world.clock.monotonic())
        world.clock.sleep(0.3)
        if world.clock.monotonic() - since[0] >= seconds:
            raise ProcessKilled
        return step()

    return replace(model, engine=WrappedEngine(model.engine, model.engine.add, dying_step))  # type: ignore[arg-type]


@pytest.mark.slow
def test_given_kills_while_a_shard_waits_then_its_rows_are_not_suspects(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    # Given lives that end early, in which the later shards are taken and prepared, but none of their rows let in
    world = begin(tmp_path, requests, "world")
    ledger = JobLedger(world.store)
    for _ in range(4):
        assert (
            work_on(world, load(), 3, kit, checkpoint_seconds=1.0, request_timeout_seconds=1e6, max_open_shards=3)
            is None
        )
    # Then those are not suspected
    assert [read_history(ledger, shard).silent for shard in (1, 2, 3)] == [3, 0, 0], (
        "the fourth life proves its machine"
    )


@pytest.mark.exhaustive
def test_given_a_run_that_ends_with_an_error_when_it_is_resumed_then_no_row_is_a_suspect(
    tmp_path: Path, requests: Path, load: Callable[[], LoadedModel], kit: Any
) -> None:
    # Given engines that fail with everything, so that row after row fails alone
    unbroken, world = begin(tmp_path, requests, "unbroken"), begin(tmp_path, requests, "world")
    work_on(unbroken, load(), float("inf"), kit)
    for good in (0, 3, 6):
        model = load()
        broken = WrappedEngine(model.engine, model.engine.add, failing(model.engine, good, world))
        with pytest.raises(BrokenEngineError):
            work_on(world, replace(model, engine=broken), float("inf"), kit, checkpoint_seconds=0)  # type: ignore[arg-type]
    history = read_history(JobLedger(world.store), 1)
    assert history.attempts
    assert (history.silent, history.isolated_rows, history.blamed) == (0, frozenset(), {})
    # Then, with a sound one, it ends as if nothing had been
    assert work_on(world, load(), float("inf"), kit) is not None
    assert rows_of(world) == rows_of(unbroken)


def failing(engine: Any, good: int, world: World) -> Callable[[], Any]:
    """Steps of which only the first few succeed; what fails takes a second."""
    runner: Any = engine.engine._runner
    execute, steps = runner.execute, 0

    def fail(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > good:
            world.clock.sleep(1.0)
            raise RuntimeError("the device said no")
        return execute(plan)

    def step() -> Any:
        runner.execute = fail
        return engine.step()

    return step


def test_given_prompts_that_are_scored_when_the_row_resumes_then_their_ended_choices_are_computed_again(
    load: Callable[[], LoadedModel], kit: Any
) -> None:
    body = kit.completion(["one", [5, 6, 7], "three"], max_tokens=6, n=2, echo=True, logprobs=1, temperature=0)
    model = load()
    (row,) = ShardReader(model).prepare(kit.make_work([body])).waiting
    model.engine.add(row.request)
    (whole,) = [completion for _ in range(99) for completion in model.engine.step()]
    ended = tuple(ended_choice(choice) for choice in whole.choices)
    resumed = resume_from(model.engine, row.request, ended)
    assert [choice.index for choice in resumed.partial] == [1, 3, 5]  # the others return the prompts' scores
    model.engine.add(resumed)
    (again,) = [completion for _ in range(99) for completion in model.engine.step()]
    assert [c.token_ids.tolist() for c in again.choices] == [c.token_ids.tolist() for c in whole.choices]
    assert all(member.prompt_logprobs is not None for member in again.members)


class WrappedEngine:
    """An engine with another `add` and `step`."""

    def __init__(self, engine: Any, add: Any, step: Any) -> None:
        self._engine = engine
        self.add = add
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def rows_with_errors(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _, info in JobLedger(world.store).parts():
        found += pq.read_table(pa.BufferReader(world.store.read(info.key))).to_pylist()
    return found
