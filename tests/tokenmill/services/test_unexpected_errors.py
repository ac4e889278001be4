"""An exception of a class that nothing catches by name, planted in each part of the processes: it costs one turn of
that part. The process goes on, the exception is counted, and the next turn works. docs/reliability.md has the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline import metric_collectors
from pipeline.dispatcher.controller import JobController
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.egress.publisher import Publisher
from pipeline.egress.release_events import ReleaseEventPublisher
from pipeline.experiments.controller import ExperimentController
from pipeline.gateway.batches.finalizer import Finalizer
from pipeline.gateway.files.service import Files
from pipeline.gateway.http.goodput import GoodputMetrics
from pipeline.gateway.http.metrics import HttpMetrics
from pipeline.gateway.inference.lane_bridge import LaneBridge
from pipeline.gateway.webhooks.service import Notifier, NotifierSettings
from pipeline.ingest.celery.generate_task import GenerateCalls
from pipeline.ingest.celery.ingest_worker import CeleryIngestWorker
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.kafka.consumer import KafkaIngest, KafkaIngestStopped
from pipeline.lane.client import CallSettings, LaneCalls
from pipeline.maintenance.retention import RetentionSweep
from pipeline.models.rollout_controller import RolloutController
from pipeline.observability.samples import Samples
from pipeline.ports import Message
from pipeline.runtime.supervision import supervise
from pipeline.scaling.autoscaler import Autoscaler
from pipeline.scaling.backlog import BacklogReader
from schemas.settings.lane import SloOptions
from schemas.settings.settings import RetentionOptions, Settings
from tests.waiting import HANG_SECONDS
from tokenmill.processes.runtime import Part, run_until_stopped, wait_for_stop
from tokenmill.processes.signals import StopSignal
from tokenmill.root import Root, open_root
from tokenmill.services import spot_interruption as spot_notice
from tokenmill.services.backends import Backends, in_process_backends
from tokenmill.services.intake import ingest_services
from tokenmill.services.service_parts import dispatcher_part, folder_part, housekeeping_part


class UnexpectedError(Exception):
    """A mistake of ours, of a class that nothing catches by name."""


class NoMessages:
    """Sends nothing: there is nothing to send."""

    max_bytes = 1_000_000

    def send(self, messages: Sequence[Message]) -> None:
        raise AssertionError("nothing has happened that could be sent")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    (tmp_path / "root").mkdir()
    with capture_logs(), open_root(str(tmp_path / "root"), Settings()) as opened:
        yield opened


@pytest.fixture
def backends(root: Root) -> Backends:
    return in_process_backends(root, Settings())


class FailingOnce:
    """Raises at the first call; later it calls the replaced function, or only waits (`waits`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, waits: bool) -> None:
        self.works = threading.Event()
        self._real = getattr(where, name)
        self._raised = False
        planted = self

        def call(*arguments: Any, **more: Any) -> Any:
            if not planted._raised:
                planted._raised = True
                raise UnexpectedError("planted")
            result = (None,) if waits else planted._real(*arguments, **more)
            planted.works.set()
            if waits:
                planted.over.wait(HANG_SECONDS)
            return result

        self.over = threading.Event()
        monkeypatch.setattr(where, name, call)


Make = Callable[[Root, Backends], Part]


def housekeeping(root: Root, backends: Backends) -> Part:
    settings = Settings(retention=RetentionOptions(interval=timedelta(seconds=0.01)))
    return housekeeping_part(root, backends, settings)


def autoscaler(root: Root, backends: Backends) -> Part:
    options = Settings().autoscale.model_copy(update={"interval_seconds": 0.01})
    return Autoscaler(
        root.world, BacklogReader(root.world, backends.heartbeats, None), backends.heartbeats, options, []
    ).run


def finalizer(root: Root, _backends: Backends) -> Part:
    return Finalizer(root.world, Files(root.world, ThreadPoolExecutor(1)), 0.01).run


def webhooks(root: Root, _backends: Backends) -> Part:
    class NoSender:
        async def send(self, *_: Any) -> None:
            raise AssertionError("there is no endpoint to notify")

    return Notifier(root.world, [], NoSender(), NotifierSettings(poll_interval_seconds=0.01)).run  # type: ignore[arg-type]


def lane_calls(root: Root, backends: Backends) -> Part:
    clock = root.world.clock
    return LaneBridge(
        backends.lane,
        clock,
        CallSettings(poll_interval_seconds=0.01),
        HttpMetrics(clock, GoodputMetrics(SloOptions().promises, 100)),
    ).run


def kafka(root: Root, _backends: Backends) -> Part:
    options = {"bootstrap_servers": ("127.0.0.1:1",)}
    return ingest_services(root, Settings(kafka=options))["kafka"]  # type: ignore[arg-type]


def celery(root: Root, _backends: Backends) -> Part:
    settings = Settings(celery={"queues": {"q": "default"}}, broker_url="redis://127.0.0.1:1/0")  # type: ignore[arg-type]
    return ingest_services(root, settings)["celery"]


PARTS: dict[str, tuple[Any, str, Make]] = {
    "dispatcher": (Dispatcher, "tick", lambda root, backends: dispatcher_part(
        root, backends, Settings(), DispatchMetrics())),
    "job controller": (JobController, "_refresh_open_jobs", lambda root, backends: dispatcher_part(
        root, backends, Settings(), DispatchMetrics())),
    "drops": (FileIngestSource, "sweep", lambda root, _: folder_part(root, Settings(), 0.0)),
    "housekeeping": (RetentionSweep, "run", housekeeping),
    "autoscaler": (Autoscaler, "decide_once", autoscaler),
    "releases": (RolloutController, "poll", lambda root, _: RolloutController(root.world).run),
    "experiments": (ExperimentController, "poll", lambda root, _: ExperimentController(root.world).run),
    "release events": (
        ReleaseEventPublisher,
        "poll",
        lambda root, _: ReleaseEventPublisher(root.world.store, NoMessages(), "t").run,
    ),
    "publisher": (Publisher, "poll", lambda root, _: Publisher(root.world, NoMessages()).run),
    "finalizer": (Finalizer, "poll", finalizer),
    "webhooks": (Notifier, "_find", webhooks),
    "spot notice": (spot_notice, "ask", lambda *_: spot_notice.watch_for_notice),
    "lane calls": (LaneCalls, "wait", lane_calls),
    "kafka": (KafkaIngest, "step", kafka),
    "celery": (CeleryIngestWorker, "_serve", celery),
}  # fmt: skip
WAITING = ("kafka", "celery", "spot notice")
"""Parts whose next turn would call a server that isn't there: only that the turn comes is checked."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_given_an_unexpected_error_then_its_part_is_restarted(
    root: Root, backends: Backends, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    where, name, make = PARTS[part]
    planted = FailingOnce(monkeypatch, where, name, waits=part in WAITING)
    stop, others = StopSignal(), threading.Event()

    def another(stop: threading.Event) -> None:
        stop.wait(HANG_SECONDS)
        others.set()

    process = ThreadPoolExecutor(1).submit(
        run_until_stopped, stop, root.world, wait_for_stop, {part: make(root, backends), "another": another}
    )
    try:
        assert planted.works.wait(HANG_SECONDS), "there was no next turn"
        assert not process.done()
        assert not others.is_set()
    finally:
        planted.over.set()
        stop.set()
        process.result(HANG_SECONDS)
    assert sum(root.world.errors.counts().values()) == 1
    samples = Samples()
    metric_collectors.unexpected_errors(root.world.errors)(samples)
    assert sum(float(str(value)) for value in samples.values["tokenmill_unexpected_errors_total"].values()) == 1


@pytest.mark.slow
def test_given_interactive_tasks_when_one_poll_fails_then_the_next_one_works(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of Celery ingest that serves `tokenmill.generate`."""
    planted = FailingOnce(monkeypatch, GenerateCalls, "run", waits=True)
    stop = threading.Event()
    calls = GenerateCalls.__new__(GenerateCalls)
    thread = threading.Thread(target=supervise, args=("celery generate", lambda _: calls.run(stop), stop, root.world))
    thread.start()
    try:
        assert planted.works.wait(HANG_SECONDS)
    finally:
        planted.over.set()
        stop.set()
        thread.join(HANG_SECONDS)
    assert root.world.errors.counts() == {"celery generate": 1}


def test_given_a_part_that_cant_go_on_then_the_process_ends_with_its_reason(
    root: Root, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_ingest: KafkaIngest) -> None:
        raise KafkaIngestStopped("kafka: no valid offset")

    monkeypatch.setattr(KafkaIngest, "step", stopped)
    with pytest.raises(KafkaIngestStopped, match="no valid offset"):
        run_until_stopped(StopSignal(), root.world, wait_for_stop, {"kafka": kafka(root, backends)})


@pytest.mark.slow
def test_given_a_main_part_that_fails_then_the_process_ends(root: Root) -> None:
    """The loss of the process's main part: a worker's engine."""

    def lost(_stop: threading.Event) -> None:
        raise UnexpectedError("the engine is gone")

    ended = threading.Event()

    def other(stop: threading.Event) -> None:
        stop.wait(HANG_SECONDS)
        ended.set()

    with pytest.raises(UnexpectedError):
        run_until_stopped(StopSignal(), root.world, lost, {"other": other})
    assert ended.is_set()
