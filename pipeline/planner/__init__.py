"""From an input to shards: read, validate, remove duplicate work, order by shared prefix and by length, cut.

Pure: what is read comes through a `RowSource`, what is planned goes to a `PlanSink`; the same input and job give the
same plan, whoever plans it.
"""

from pipeline.planner.api import (
    BrokenInput,
    InputError,
    InvalidInput,
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
from pipeline.planner.estimates.capacity import HARDWARE, DoesNotFit, Hardware, ModelShape, WorkEstimate, at_rate, bound
from pipeline.planner.estimates.estimate import InputEstimate, measure
from pipeline.planner.estimates.sample import ShardSample
from pipeline.planner.plan import plan
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
    "InputError",
    "InvalidInput",
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
