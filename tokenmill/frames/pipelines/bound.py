"""The steps of a pipeline over the columns of one table, checked as far as they can be without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.calls import TableCall
from tokenmill.frames.data.frame import Frame
from tokenmill.frames.data.kinds import ArrowFrame
from tokenmill.frames.pipelines.steps import Filter, Step


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step over a table.

    Attributes:
        step: as given.
        call: its call over a table without rows that has the columns that the step can use.
        filters: before it.
        inputs: steps whose answers its texts use: a row in which one of them failed can't be computed.
        needs: steps that must be computed before, in their order: these, and those whose columns filters and functions
            may read.
        columns: of the table, that are read for it.
    """

    step: Step
    call: TableCall
    filters: tuple[Filter, ...]
    inputs: tuple[str, ...]
    needs: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def new(self) -> tuple[str, ...]:
        """The names of its new columns."""
        return self.call.names


def bind(steps: Sequence[Step | Filter], frame: Frame) -> tuple[BoundStep, ...]:
    """The steps over a table's columns. Raises `InvalidCall`, with the step's name."""
    bound: list[BoundStep] = []
    filters: tuple[Filter, ...] = ()
    for number, one in enumerate(steps):
        known = (*frame.columns, *(name for before in bound for name in before.new))
        if isinstance(one, Filter):
            if isinstance(one.condition, str) and list(known).count(one.condition) != 1:
                later = _made_later([one.condition], known, steps[number + 1 :])
                raise InvalidCall(
                    f"filter: there is no one column {one.condition!r}; there are: {', '.join(known[:20])}{later}"
                )
            filters = (*filters, one)
        else:
            try:
                bound.append(_bind(one, frame, bound, known, filters))
            except InvalidCall as error:
                later = _made_later(one.task.columns, known, steps[number + 1 :])
                raise InvalidCall(f"step {one.name!r}: {error}{later}") from error
    return tuple(bound)


def _made_later(used: Iterable[str], known: Sequence[str], behind: Sequence[Step | Filter]) -> str:
    """The end of an error about columns, if one that is not there is made by a step behind."""
    steps = [step for step in behind if isinstance(step, Step)]
    for column in used:
        for step in steps:
            if column not in known and column in {step.name + suffix for suffix in step.task.suffixes}:
                return f". The step {step.name!r}, which comes later, makes {column!r}: put it before"
    return ""


def _bind(
    step: Step, frame: Frame, before: Sequence[BoundStep], known: Sequence[str], filters: tuple[Filter, ...]
) -> BoundStep:
    nothing = ArrowFrame(pa.table([pa.array([], pa.string())] * len(known), names=list(known)))
    call = TableCall(nothing, step.task, step.name)
    used = {*step.task.columns}
    read = used | {one.condition for one in filters if isinstance(one.condition, str)}
    reads_all = step.task.judging.find_reason is not None or any(callable(one.condition) for one in filters)
    return BoundStep(
        step,
        call,
        filters,
        inputs=tuple(one.name for one in before if one.name in used),
        needs=tuple(one.name for one in before if reads_all or read & {*one.new}),
        columns=tuple(_unique(name for name in frame.columns if reads_all or name in read)),
    )


def _unique(names: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(names)
