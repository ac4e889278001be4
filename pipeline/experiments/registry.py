"""The experiments of a root: numbered, one open at a time, each with immutable objects.

    experiments/NNNNN/experiment.json   outcome.json   slices/SSSSSSSS-WORKER.json   blocks/BBBBBBBB.json

A worker writes one small object for each slice. Its other metrics would not do: they expire with the worker, and are
samples of counters at times that don't fit the slices. A dispatcher writes their sums for each block.
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
from schemas.experiments import ClosedBlock, Experiment, ExperimentOutcome, SliceReport
from schemas.stored import StoredModel

EXPERIMENTS: Final = "experiments/"

MAX_REPORTS: Final = 100_000
"""Of one block that are read; further ones are unusable."""

MAX_REPORT_BYTES: Final = 16_384

_REPORT = re.compile(r"\d{8}-.+\.json")
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

    def reports(self, experiment: Experiment, slices: range) -> Iterator[SliceReport | None]:
        """The reports of these slices, in order; None for each that is damaged, does not fit the experiment, or is one
        more than `MAX_REPORTS`. These are logged."""
        for found, key in enumerate(self._report_keys(experiment, slices)):
            if found < MAX_REPORTS:
                yield self._read_report(experiment, key)
                continue
            if found == MAX_REPORTS:
                where = self._store.locate(key)
                logger.warning("there are too many reports of slices; this one and later ones are left out", key=where)
            yield None

    def num_reports(self, experiment: Experiment, slices: range) -> int:
        """The number of stored reports of these slices, unusable ones included."""
        return sum(1 for _ in self._report_keys(experiment, slices))

    def close(self, experiment: Experiment, block: ClosedBlock) -> ClosedBlock:
        """Store a block's sums; returns those that count, which are others if they were stored first."""
        if self._store.create(_block_key(experiment, block.block), block.to_json()):
            return block
        return self.closed(experiment, block.block) or block

    def closed(self, experiment: Experiment, block: int) -> ClosedBlock | None:
        """The block's sums; None: it is not closed yet. Raises `LedgerError` for damaged ones."""
        key = _block_key(experiment, block)
        found, names = self._read(key, ClosedBlock), {arm.name for arm in experiment.arms}
        if found is not None and (found.block != block or not {one.arm for one in found.machines} <= names):
            raise LedgerError(f"{self._store.locate(key)}: does not fit the experiment's record")
        return found

    def closed_blocks(self, experiment: Experiment) -> Iterator[ClosedBlock]:
        """The sums of all closed blocks, in order."""
        for block in range(experiment.max_blocks):
            found = self.closed(experiment, block)
            if found is None:
                return
            yield found

    def _report_keys(self, experiment: Experiment, slices: range) -> Iterator[str]:
        prefix = f"{_folder(experiment.number)}slices/"
        for entry in self._store.list(prefix, f"{prefix}{slices.start:08d}"):
            if entry.key >= f"{prefix}{slices.stop:08d}":
                return
            if entry.size <= MAX_REPORT_BYTES and _REPORT.fullmatch(entry.key.removeprefix(prefix)):
                yield entry.key

    def _read_report(self, experiment: Experiment, key: str) -> SliceReport | None:
        """The report with this key; None if it can't be used."""
        try:
            report = self._read(key, SliceReport)
            if report is None:
                return None
            is_consistent = (
                key == _report_key(experiment, report.slice, report.worker)
                and report.arm == arm_of(experiment, report.unit, report.slice).name
                and report.counts.seconds <= 2 * experiment.slice_seconds
            )
            if not is_consistent:
                raise LedgerError(f"{self._store.locate(key)}: does not fit the experiment's record")
            return report
        except LedgerError as error:
            logger.warning("a slice's report can't be used", reason=str(error))
            return None

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


def _block_key(experiment: Experiment, block: int) -> str:
    return f"{_folder(experiment.number)}blocks/{block:08d}.json"
