"""The planner turns an input into shards: read, validate, deduplicate, order by shared prefix and by length, cut.

It is pure: rows come from a `RowSource` and the plan goes to a `PlanSink`; the same input and job give the same plan in
every process.
"""

from pipeline.planner.estimates.capacity import HARDWARE, DoesNotFit, Hardware, ModelShape, WorkEstimate, at_rate, bound
from pipeline.planner.estimates.estimate import InputEstimate, measure
from pipeline.planner.estimates.sample import ShardSample
from pipeline.planner.plan import plan
from pipeline.planner.ports import (
    BrokenInput,
    FormerAnswers,
    InputError,
    InvalidInput,
    ModelRouting,
    PlanMismatch,
    PlanSink,
    PlanSummary,
    RowSource,
    SourceBatch,
    SourceFile,
    SourceRow,
    StoredShard,
    TokenCounter,
    TooManyRows,
)
from pipeline.planner.readers.source import choose_files, open_source

__all__ = [
    "measure",
    "bound",
    "at_rate",
    "WorkEstimate",
    "ModelShape",
    "InputEstimate",
    "Hardware",
    "DoesNotFit",
    "HARDWARE",
    "BrokenInput",
    "FormerAnswers",
    "InputError",
    "InvalidInput",
    "ModelRouting",
    "PlanMismatch",
    "PlanSink",
    "PlanSummary",
    "RowSource",
    "SourceBatch",
    "SourceFile",
    "SourceRow",
    "StoredShard",
    "ShardSample",
    "TokenCounter",
    "TooManyRows",
    "choose_files",
    "open_source",
    "plan",
]
