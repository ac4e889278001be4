"""The estimate of a pipeline before it runs, with assumed answers where a step's texts use those of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenmill import output
from tokenmill.errors import InvalidCall
from tokenmill.frames.calls import TableCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.data.kinds import DictsFrame
from tokenmill.frames.jobs.estimate import TableEstimate
from tokenmill.frames.jobs.job import TableJob
from tokenmill.frames.pipelines.bound import BoundStep

WORD: Final = "word "
"""Of an assumed answer: a token in most vocabularies."""


class AssumedAnswer(str):
    """A text in place of an answer; each of its attributes and parts is the same text."""

    def __getattr__(self, name: str) -> AssumedAnswer:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _key: Any) -> AssumedAnswer:
        return self


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """What a pipeline would take.

    Attributes:
        steps: the estimate of each step, by name, in their order. None: its texts can't be rendered with an assumed
            answer, so it is not known.
        assumed: steps whose texts use assumed answers.
        seconds, cost: of all steps one after the other; None: unknown.
    """

    steps: Mapping[str, TableEstimate | None]
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float | None:
        return _sum(None if step is None else step.seconds for step in self.steps.values())

    @property
    def cost(self) -> float | None:
        return _sum(None if step is None else step.cost for step in self.steps.values())

    def __str__(self) -> str:
        lines = []
        for name, step in self.steps.items():
            mark = " (with assumed answers of the steps before it, for all rows)" if name in self.assumed else ""
            lines.append(f"{name}{mark}")
            text = "unknown: its texts can't be rendered with assumed answers" if step is None else str(step)
            lines += [f"  {line}" for line in text.splitlines()]
        if self.seconds is not None:
            lines.append(f"all steps here    {output.duration(self.seconds)}")
        if self.cost is not None:
            lines.append(f"cost of all       {self.cost:.4f}")
        return "\n".join(lines)


def estimate_steps(frame: Frame, steps: Sequence[tuple[BoundStep, TableJob]]) -> PipelineEstimate:
    """Estimate each step by a dry run. Raises what that raises."""
    found: dict[str, TableEstimate | None] = {}
    lengths: dict[str, int] = {}
    for bound, job in steps:
        rows = DictsFrame(
            [
                {**cells, **_assumed(steps, bound, lengths, row, job.adapters)}
                for row, cells in enumerate(frame.cells(bound.columns))
            ]
        )
        rows.columns = bound.call.frame.columns
        estimate = None
        try:
            estimate = job.over(TableCall(rows, bound.step.task, bound.name)).estimate()
        except InvalidCall:
            if not bound.inputs:
                raise
        found[bound.name] = estimate
        lengths[bound.name] = 0 if estimate is None or not estimate.rows else estimate.expected_tokens // estimate.rows
    assumed = tuple(bound.name for bound, _ in steps if bound.needs)
    return PipelineEstimate(found, assumed)


def _assumed(
    steps: Sequence[tuple[BoundStep, TableJob]],
    bound: BoundStep,
    lengths: Mapping[str, int],
    row: int,
    adapters: Sequence[str],
) -> dict[str, Any]:
    """The assumed cells of a row in the columns that a step needs. No two rows have the same answers, but for names of
    the step's adapters, which take turns."""
    cells: dict[str, Any] = {}
    for before, _ in steps:
        if before.name in bound.needs:
            cells |= dict.fromkeys(before.new)
            cells[before.name] = AssumedAnswer(f"{row} " + WORD * lengths[before.name])
    column = bound.step.task.adapter_column
    if column in cells:
        cells[column] = adapters[row % len(adapters)]
    return cells


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None if a value is."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
