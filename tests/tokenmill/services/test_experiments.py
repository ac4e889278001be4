"""An experiment with the scheduler's weights, at workers as they run."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ScheduleConfig, SloConfig
from pipeline.adapters.system_clock import SystemClock
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.lane.client import answer
from schemas.experiments import SliceReport
from schemas.workers.lane import LaneRequest
from schemas.workers.metrics import ExperimentMetrics
from tests.pipeline.experiments.simulated_slices import make_experiment
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

        def has_reported() -> list[SliceReport]:
            list(
                answer(
                    backends.lane,
                    LaneRequest(clock.now().isoformat(), key, chat("r", "a", max_tokens=3)["body"]),
                    clock,
                )
            )
            return registry.reports(experiment)

        def its_metrics() -> ExperimentMetrics | None:
            metrics = worker.metrics()
            return None if metrics is None else metrics.experiment

        try:
            metrics = wait_for(its_metrics, "the worker reports no arm")
            wait_for(lambda: sum(arm.seconds for arm in its_metrics().arms.values()), "no slice is measured")
        finally:
            stop.set()
            thread.join(HANG_SECONDS)
        assert not thread.is_alive()
        first, *_ = registry.reports(experiment)
        assert metrics is not None
        assert (metrics.name, set(metrics.arms)) == ("e", {"own", "more"})
        assert first.model == "tiny"
        assert first.counts.seconds == pytest.approx(1.2, abs=1.0)
