"""Readiness of a model: it is loaded, warmed up and checked by canary prompts before it is published as served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from pipeline.models.canaries import Canaries, difference
from pipeline.observability.samples import Samples, Source
from pipeline.ports import World
from schemas.releases import CanaryAnswer, CanaryFailure, CanaryRecord
from schemas.settings.releases import WarmupOptions
from tokenmill.errors import UserError
from workers.model.loaded_model import LoadedModel
from workers.model.warmup import answer_canaries, warm_up
from workers.shards.store_outage import wait_out

Answer = TypeVar("Answer")
LoadModel = Callable[[], LoadedModel]
EXIT_CANARY: Final = 71

logger = structlog.get_logger(__name__)


class CanaryFailed(UserError):
    """Raised when a model's answers to the canary prompts differ from the recorded ones; it must not serve."""

    exit_code = EXIT_CANARY


class Readiness:
    """Loads and checks models for one worker.

    Args:
        worker: the worker's name.
    """

    def __init__(self, world: World, options: WarmupOptions, worker: str) -> None:
        self._world = world
        self._options = options
        self._worker = worker
        self._seconds: dict[tuple[str, str], float] = {}  # model, part

    def load(self, load: LoadModel, stop: threading.Event | None = None) -> LoadedModel:
        """Load a model, warm it up, and compare its answers to the canary prompts with the record; the durations are
        logged. Without a record the answers are recorded.

        Args:
            stop: if given, outages of the store are waited out until it is set.

        Raises what loading raises, `BrokenEngineError` and `CanaryFailed`; `StoreUnavailable` for an outage that isn't
        waited out.
        """
        begun = time.perf_counter()
        model = self._outlast(load, stop)
        loaded = time.perf_counter()
        seconds = {"load": loaded - begun}
        compared = "nothing"
        if not model.weightless:
            warm_up(model, self._options)
            warm = time.perf_counter()
            answers = answer_canaries(model)
            compared = self._outlast(lambda: self._compare(model, answers), stop)
            seconds |= {"warm_up": warm - loaded, "canary": time.perf_counter() - warm}
        self._seconds |= {(model.name, part): took for part, took in seconds.items()}
        took = {f"{part}_seconds": round(value, 3) for part, value in seconds.items()}
        logger.info("model ready", model=model.name, digest=model.digest, canary=compared, **took)
        return model

    def samples(self) -> Source:
        """The durations of each model's preparation, as metrics."""

        def write(samples: Samples) -> None:
            for (model, part), seconds in sorted(self._seconds.items()):
                samples.value("tokenmill_warmup_seconds", seconds, model, part)

        return write

    def _outlast(self, use: Callable[[], Answer], stop: threading.Event | None) -> Answer:
        return use() if stop is None else wait_out(use, self._world.clock, stop)

    def _compare(self, model: LoadedModel, answers: tuple[CanaryAnswer, ...]) -> str:
        """Compare the answers with the record, or record them; the result for the log."""
        canaries, pin = Canaries(self._world.store), model.pin()
        record = canaries.find(pin)
        if record is None:
            made = CanaryRecord(pin=pin, answers=answers, recorded_at=self._world.clock.now(), worker=self._worker)
            if canaries.record(made):
                return "recorded"
            record = canaries.find(pin) or made
        reason = difference(record.answers, answers, self._options.tolerance_of(model.dtype))
        if reason is None:
            return "as recorded"
        now = self._world.clock.now()
        canaries.failed(CanaryFailure(pin=pin, reason=reason, at=now, worker=self._worker))
        raise CanaryFailed(
            f"{model.name} ({pin.digest or model.source}) does not answer as {record.worker} recorded on "
            f"{record.recorded_at:%Y-%m-%d}: {reason}; it is not served. Look for another machine, driver or library; "
            "if the record is wrong, replace it with 'tokenmill canary record --again'"
        )
