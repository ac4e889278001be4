"""How fast a simulated worker is: what `tokenmill bench --json` has measured, read as a continuous batch.

A step with b rows takes what it took in the measurement of decode at that batch, and in between what lies between; each
row takes its part of it for each token of its answer, and its prompt as long as prefill takes. So b rows with prompts
of P and answers of A tokens flow through at 1 / (P / prefill + A / decode(b)) rows a second, and each is in the batch
for b times that (Little's law).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.ports import PipelineError

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class BadWorkerModel(PipelineError):
    """Raised when a file doesn't say how fast a worker is."""


class Decoding(BaseModel):
    """Tokens a second, of all rows together, at a batch of so many."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: Annotated[int, Field(ge=1)]
    tokens_per_second: Above


class WorkerModel(BaseModel):
    """One worker.

    Attributes:
        name: of what was measured.
        prefill: tokens of prompts a second.  decode: by batch, the smallest first; the last is its largest batch.
        cold_start_seconds: seconds from the wish for a worker until it computes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    prefill: Above
    decode: Annotated[tuple[Decoding, ...], Field(min_length=1)]
    cold_start_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0

    @model_validator(mode="after")
    def _in_order(self) -> WorkerModel:
        batches = [point.batch for point in self.decode]
        if batches != sorted(set(batches)):
            raise ValueError(f"decode has the batches {batches}; give each once, the smallest first")
        return self

    @property
    def batch(self) -> int:
        """Rows that it computes at once, at most."""
        return self.decode[-1].batch

    def step_seconds(self, batch: float) -> float:
        """Of a step of decode with so many rows."""
        steps = [point.batch / point.tokens_per_second for point in self.decode]
        batches = [point.batch for point in self.decode]
        right = min(max(1, bisect_left(batches, batch)), len(batches) - 1) if len(batches) > 1 else 0
        if right == 0 or batch <= batches[0]:
            return steps[0]
        left = right - 1
        share = min(1.0, (batch - batches[left]) / (batches[right] - batches[left]))
        return steps[left] + share * (steps[right] - steps[left])

    def rows_per_second(self, batch: float, prompt: float, answer: float) -> float:
        """That end while so many are always in the batch. `prompt`, `answer`: tokens of each."""
        batch = min(batch, self.batch)
        return 1 / (prompt / self.prefill + answer * self.step_seconds(batch) / batch)

    def row_seconds(self, batch: float, prompt: float, answer: float) -> float:
        """That each row is in the batch."""
        batch = min(batch, self.batch)
        return batch / self.rows_per_second(batch, prompt, answer)

    def seconds(self, rows: float, prompt: float, answer: float) -> float:
        """Of a worker whose batch is always full, for so many rows."""
        return rows / self.rows_per_second(self.batch, prompt, answer)


EXAMPLE = WorkerModel(
    name="example: an 8B model on one large GPU (assumed, not measured)",
    prefill=20_000.0,
    decode=(
        Decoding(batch=1, tokens_per_second=120.0),
        Decoding(batch=16, tokens_per_second=1_600.0),
        Decoding(batch=64, tokens_per_second=5_000.0),
        Decoding(batch=256, tokens_per_second=10_000.0),
    ),
    cold_start_seconds=240.0,
)
"""Where no measurement is given."""


def read_worker_model(path: Path, cold_start_seconds: float | None = None) -> WorkerModel:
    """From a file: a `WorkerModel` as JSON, or the output of `tokenmill bench --json`. `cold_start_seconds`: in
    place of the file's. Raises `BadWorkerModel`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadWorkerModel(f"{path}: can't be read as JSON: {error}") from error
    try:
        found = _of_bench(document) if isinstance(document, dict) and "results" in document else document
        if cold_start_seconds is not None:
            found = {**found, "cold_start_seconds": cold_start_seconds}
        return WorkerModel.model_validate(found)
    except (ValidationError, KeyError, TypeError) as error:
        reason = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        what = str(error) if reason is None else f"{'.'.join(map(str, reason['loc']))}: {reason['msg']}"
        raise BadWorkerModel(
            f"{path}: says not how fast a worker is ({what}); give the output of 'tokenmill bench --json', or an "
            "object with name, prefill, decode and cold_start_seconds"
        ) from error


def _of_bench(document: dict[str, Any]) -> dict[str, Any]:
    """The measurements of decode by batch, and of prefill."""
    decode = {
        int(result["rows"]): float(result["tokens_per_second"])
        for result in document["results"]
        if str(result["name"]).startswith("decode, ")
    }
    points = [{"batch": batch, "tokens_per_second": rate} for batch, rate in sorted(decode.items())]
    name = f"{document.get('model', 'a model')} on {document.get('machine', 'a machine')}"
    return {"name": name, "prefill": document["prefill"], "decode": points}
