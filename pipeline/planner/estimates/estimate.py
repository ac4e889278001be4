"""Estimate of a job's work, as planning would find it, without storing anything. Texts are spilled only for a sample of
its shards, one segment at a time."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.planner.estimates.sample import ShardSample
from pipeline.planner.plan import limited
from pipeline.planner.ports import FormerAnswers, ModelRouting, RowSource, TokenCounter
from pipeline.planner.reuse import take_reusable
from pipeline.planner.seen_ids import SeenIds
from pipeline.planner.segment import SegmentBuilder, SegmentTexts
from pipeline.planner.segment_sizes import SegmentSizes
from pipeline.planner.tokens import TemplateTokens, TokenEstimator
from pipeline.planner.validate import Validator
from pipeline.ports import World
from schemas.jobs.job import Job
from schemas.requests.errors import RowErrorCode


@dataclass(frozen=True, slots=True)
class InputEstimate:
    """Totals of an input; tokens are of the unique requests.

    Attributes:
        rows: lines that get a result.  rejected: of them, refused; `reasons`: number of refused rows by reason.
        unique: requests to compute.  shards: number of shards that would be cut.
        prompt_tokens: counted when `exact`, else estimated.  shared_prefix_tokens: of them, shared with an earlier one.
        expected_tokens: of all answers.  max_tokens: their maximum.
        tokens_of_models: prompt and expected answer tokens, by model name.
        segments: number of segments that would be planned.  sequences: one for each choice of each unique request.
        certain_tokens: minimum tokens of the longest answer, for any output of the model.
        reused: rows that would take answers of a former job.
    """

    rows: int
    blank_lines: int
    rejected: int
    reasons: dict[RowErrorCode, int]
    unique: int
    shards: int
    prefix_groups: int
    prompt_tokens: int
    shared_prefix_tokens: int
    expected_tokens: int
    max_tokens: int
    exact: bool
    tokens_of_models: dict[str, int]
    segments: int = 1
    sequences: int = 0
    certain_tokens: int = 0
    reused: int = 0

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens left to compute when every shared prefix is computed once."""
        return max(0, self.prompt_tokens - self.shared_prefix_tokens)


def measure(
    source: RowSource,
    job: Job,
    world: World,
    *,
    counter: TokenCounter | None = None,
    exact: bool = False,
    template: TemplateTokens | None = None,
    sample: ShardSample | None = None,
    max_model_len: int | None = None,
    routing: ModelRouting | None = None,
    former: FormerAnswers | None = None,
) -> InputEstimate:
    """Read and validate an input as planning would.

    Args:
        counter: counts a text's tokens with the model's tokenizer.  exact: count every prompt, not a sample.
        template: tokens that the chat template adds; None: a rule of thumb.
        sample: collects shards for a dry run.
        max_model_len: tokens of the model's context: requests beyond it are counted as refused. Without `exact`, only
            requests whose max_tokens alone exceed it.
        routing, former: see `plan`.
    Raises:
        InputError: the input can't be read.
    """
    estimator = TokenEstimator(counter, exact=exact, template=template or TemplateTokens())
    settings = job.settings.plan
    models = [model.name for model in job.models]
    reasons: Counter[RowErrorCode] = Counter()
    totals: Counter[str] = Counter()
    of_models: Counter[str] = Counter()
    sizes = SegmentSizes.of(settings)

    def close() -> None:
        plan = builder.finish(settings, None)
        if sample is not None:
            sample.add(plan)
        totals["segments"] += 1
        totals["sequences"] += plan.sequences
        totals["certain_tokens"] = max(totals["certain_tokens"], builder.certain_tokens)
        totals["unique"] += plan.unique
        totals["max_tokens"] += plan.max_tokens
        totals["prompt_tokens"] += plan.prompt_tokens
        totals["expected_tokens"] += plan.expected_tokens
        totals["shared_bytes"] += plan.shared_bytes
        totals["prefix_groups"] += plan.prefix_groups
        totals["shards"] += len(plan.ranges)
        of_models.update(plan.tokens_of_models())

    def begin() -> SegmentBuilder:
        # The previous segment's texts are not read any more: its file is overwritten.
        spill = None if sample is None else SegmentTexts(Path(folder) / f"texts-{totals['segments'] % 2}.arrow", None)
        return SegmentBuilder(spill, models)

    with tempfile.TemporaryDirectory(prefix="estimate-", dir=world.scratch) as folder:
        builder, end = begin(), sizes.end(0)
        validator = Validator(job, SeenIds(Path(folder)), estimator, max_model_len=max_model_len, routing=routing)
        for batch in limited(source.batches(sizes), job.settings.limit):
            world.on_progress()
            if batch.first_row >= end:
                close()
                builder, end = begin(), sizes.end(batch.first_row)
            checked = validator.check(replace(batch, carried=None))
            if former is not None:
                now = world.clock.now()
                taken = take_reusable(checked, former, None, created_at=job.created_at, at=now)
                totals["reused"] += 0 if taken is None else taken.num_rows
            reasons.update(rejected.error.code for rejected in checked.rejected)
            totals["rows"] += len(batch.rows)
            totals["blank"] += batch.end_row - batch.first_row - len(batch.rows)
            builder.add(checked)
        close()
    return InputEstimate(
        rows=totals["rows"],
        blank_lines=totals["blank"],
        rejected=reasons.total(),
        reasons=dict(reasons),
        unique=totals["unique"],
        shards=totals["shards"],
        prefix_groups=totals["prefix_groups"],
        prompt_tokens=totals["prompt_tokens"],
        shared_prefix_tokens=estimator.bytes_to_tokens(totals["shared_bytes"]),
        expected_tokens=totals["expected_tokens"],
        max_tokens=totals["max_tokens"],
        exact=estimator.exact or not totals["unique"],
        tokens_of_models=dict(of_models),
        segments=totals["segments"],
        sequences=totals["sequences"],
        certain_tokens=totals["certain_tokens"],
        reused=totals["reused"],
    )
