"""An experiment with the scheduler's weights, at workers as they run."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from engine.config import EngineConfig, ScheduleConfig, SloConfig
from pipeline.adapters.system_clock import SystemClock
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.lane.client import answer
from schemas.workers.lane import LaneRequest
from schemas.workers.metrics import ExperimentMetrics
from tests.pipeline.experiments.simulated_slices import make_experiment, stored_reports
from tests.pipeline.observability.scrapes import scrape
from tests.tokenmill.command_processes import Processes, as_jsonl
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.config.job_options import ChosenModel
from tokenmill.models.sources import ModelSource
from tokenmill.root import open_root
from tokenmill.services.backends import in_process_backends
from tokenmill.services.worker import WorkerService, load_any
from tokenmill.settings import read_settings
from workers.text.chat_options import OWN_CHAT


@pytest.mark.slow
def test_a_worker_takes_part_in_the_roots_experiment(folder: Path, model_folder: Path, chat: Any) -> None:
    settings, stop, clock = read_settings(), threading.Event(), SystemClock()
    chosen = ChosenModel("tiny", ModelSource("tiny", model_folder, None, 0))
    config = EngineConfig(dtype="float32", threads=1, schedule=ScheduleConfig(slo=SloConfig()))
    load = partial(load_any, chosen, config, OWN_CHAT)
    with open_root(str(folder / "root"), settings) as root:
        registry, backends = ExperimentRegistry(root.world.store), in_process_backends(root, settings)
        experiment = make_experiment(started_at=clock.now() - timedelta(seconds=1), slice_seconds=1.5)
        registry.begin(experiment)
        worker = WorkerService(root, backends, [load], settings, 60.0)
        thread = threading.Thread(target=worker, args=(stop,))
        thread.start()
        key = load().pin().key

        def its_metrics() -> ExperimentMetrics | None:
            metrics = worker.metrics()
            return None if metrics is None else metrics.experiment

        def has_measured() -> bool:
            list(answer(backends.lane, LaneRequest(clock.now().isoformat(), key, chat("r", "a")["body"]), clock))
            found = its_metrics()
            return found is not None and sum(arm.first_tokens for arm in found.arms.values()) > 0

        try:
            wait_for(has_measured, "no slice with a request is measured")
            metrics = its_metrics()
        finally:
            stop.set()
            thread.join(HANG_SECONDS)
        assert not thread.is_alive()
        first, *_ = stored_reports(registry, experiment)
        assert metrics is not None
        assert (metrics.name, set(metrics.arms)) == ("e", {"own", "more"})
        assert first.model == "tiny"
        assert first.counts.seconds > 0


def weight_now(url: str) -> float:
    return scrape(f"{url}/metrics").sum("tokenmill_slo_weight", term="utilisation")


@pytest.mark.exhaustive
def test_one_worker_computes_two_arms_by_slices_and_has_its_own_weights_again(
    processes: Processes, model_folder: Path, chat: Any, tokenmill: Any
) -> None:
    # Given `serve` with work, and callers,
    model = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1, "--max-num-seqs", 16)
    served = processes.start("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *model)
    url = processes.url(served)
    client = OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key="none")
    rows = [chat(f"r{n}", f"number {n}", max_tokens=100, ignore_eos=True) for n in range(4_000)]
    file = client.files.create(file=("in.jsonl", as_jsonl(rows)), purpose="batch")
    client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    root = ("--root", processes.folder / "data")
    # when two arms are compared in slices of 5 s,
    arms = ("--arm", "own", "--arm", "more:utilisation=50")
    blocks = ("--slice", "5s", "--min-blocks", 4, "--max-blocks", 4)
    assert tokenmill("experiment", "start", "weights", *arms, *blocks, *root).code == 0
    seen: set[float] = set()

    def has_ended() -> bool:
        list(client.chat.completions.create(**chat("c", "a", max_tokens=5)["body"], stream=True))
        seen.add(weight_now(url))
        return tokenmill("experiment", "status", *root, "--json").json()["outcome"] is not None

    wait_for(has_ended, "the experiment does not end", pause_seconds=1)
    # then both had their slices, and the worker has its own weights at the end.
    assert seen == {0.3, 50.0}
    shown = tokenmill("experiment", "report", *root, "--json").json()
    print(tokenmill("experiment", "report", *root).out)
    assert shown["outcome"]["by"] in ("comparison", "time")
    assert [arm["machines"] for arm in shown["arms"]] == [1, 1]
    assert all(arm["slices"] >= 1 and arm["counts"]["first_tokens"] >= 1 for arm in shown["arms"])
    wait_for(lambda: weight_now(url) == 0.3, "an arm's weights stay")
