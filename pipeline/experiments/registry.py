"""The experiments of a root: numbered, one open at a time, each with immutable objects.

    experiments/NNNNN/experiment.json   outcome.json   slices/SSSSSSSS-WORKER.json

A worker writes one small object for each slice. Its other metrics would not do: they expire with the worker, and are
samples of counters at times that don't fit the slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from pipeline.experiments.assignment import arm_of
from pipeline.ledger.ledger import LedgerError, parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore, PipelineError
from schemas.experiments import Experiment, ExperimentOutcome, SliceReport
from schemas.stored import StoredModel

EXPERIMENTS: Final = "experiments/"

MAX_REPORTS: Final = 200_000
"""Of one experiment that are read."""

MAX_REPORT_BYTES: Final = 16_384

_REPORT = re.compile(r"(\d{8})-(.+)\.json")
SomeModel = TypeVar("SomeModel", bound=StoredModel)

logger = structlog.get_logger(__name__)


class ExperimentError(PipelineError):
    """Raised when an experiment can't be begun, ended or read as requested; the message has the reason and the
    remedy."""


@dataclass(frozen=True, slots=True)
class ExperimentState:
    """An experiment, and its outcome once there is one."""

    experiment: Experiment
    outcome: ExperimentOutcome | None


class ExperimentRegistry:
    """The experiments of the root in `store`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def last(self) -> ExperimentState | None:
        """The last experiment; None: there was none. Raises `LedgerError` for a damaged one."""
        return next((found for number in self.numbers(newest=True) if (found := self.find(number)) is not None), None)

    def find(self, number: int) -> ExperimentState | None:
        """The experiment with this number; None: there is none."""
        experiment = self._read(f"{_folder(number)}experiment.json", Experiment)
        return None if experiment is None else ExperimentState(experiment, self.outcome(number))

    def outcome(self, number: int) -> ExperimentOutcome | None:
        """The experiment's outcome; None: there is none yet."""
        return self._read(f"{_folder(number)}outcome.json", ExperimentOutcome)

    def numbers(self, *, newest: bool = False) -> list[int]:
        """The numbers of all experiments, in order."""
        names = [prefix.removeprefix(EXPERIMENTS).rstrip("/") for prefix in self._store.folders(EXPERIMENTS)]
        return sorted((int(name) for name in names if re.fullmatch(r"\d{5}", name)), reverse=newest)

    def next_number(self) -> int:
        """The number of the next experiment. Raises `ExperimentError` while one is open."""
        last = self.last()
        if last is not None and last.outcome is None:
            name = last.experiment.name
            raise ExperimentError(f"experiment {name} is open; 'tokenmill experiment stop' ends it")
        return 1 if last is None else last.experiment.number + 1

    def begin(self, experiment: Experiment) -> None:
        """Begin the experiment, whose number is `next_number`. Raises `ExperimentError`."""
        if not self._store.create(f"{_folder(experiment.number)}experiment.json", experiment.to_json()):
            raise ExperimentError("another experiment was begun just now; 'tokenmill experiment status' shows it")

    def end(self, experiment: Experiment, outcome: ExperimentOutcome) -> ExperimentOutcome:
        """End the experiment; returns the outcome that counts, which is another one if that was stored first."""
        if self._store.create(f"{_folder(experiment.number)}outcome.json", outcome.to_json()):
            return outcome
        return self.outcome(experiment.number) or outcome

    def report(self, experiment: Experiment, report: SliceReport) -> None:
        """Store what a worker measured in a slice; the first report counts."""
        self._store.create(_report_key(experiment, report.slice, report.worker), report.to_json())

    def reports(self, experiment: Experiment, known: dict[str, SliceReport | None] | None = None) -> list[SliceReport]:
        """All reports of the experiment that can be read and are consistent with it; the others are logged.

        Args:
            known: cache of reports by their keys; new ones are added.

        Raises:
            ExperimentError: there are more than `MAX_REPORTS`.
        """
        known = {} if known is None else known
        for key in self._report_keys(experiment):
            if key not in known:
                try:
                    known[key] = self._read_report(experiment, key)
                except LedgerError as error:
                    known[key] = None
                    logger.warning("a slice's report can't be used", reason=str(error))
        return [report for _, report in sorted(known.items()) if report is not None]

    def _report_keys(self, experiment: Experiment) -> Iterator[str]:
        for found, entry in enumerate(self._store.list(f"{_folder(experiment.number)}slices/")):
            if found >= MAX_REPORTS:
                raise ExperimentError(f"experiment {experiment.name} has more than {MAX_REPORTS:,} reports of slices")
            if entry.size <= MAX_REPORT_BYTES and _REPORT.fullmatch(entry.key.rpartition("/")[2]):
                yield entry.key

    def _read_report(self, experiment: Experiment, key: str) -> SliceReport | None:
        report = self._read(key, SliceReport)
        if report is None:
            return None
        is_consistent = (
            key == _report_key(experiment, report.slice, report.worker)
            and report.slice < experiment.num_slices
            and report.arm == arm_of(experiment, report.unit, report.slice).name
            and report.counts.seconds <= 2 * experiment.slice_seconds
        )
        if not is_consistent:
            raise LedgerError(f"{self._store.locate(key)}: does not fit the experiment's record")
        return report

    def _read(self, key: str, kind: type[SomeModel]) -> SomeModel | None:
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return parse_stored(self._store.locate(key), data, kind)


def _folder(number: int) -> str:
    return f"{EXPERIMENTS}{number:05d}/"


def _report_key(experiment: Experiment, number: int, worker: str) -> str:
    return f"{_folder(experiment.number)}slices/{number:08d}-{worker}.json"
