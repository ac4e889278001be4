"""What a job would compute, without planning it for real: nothing is spilled and nothing is written."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.planner.api import RowSource, TokenCounter
from pipeline.planner.plan import limited
from pipeline.planner.seen import SeenIds
from pipeline.planner.segment import SegmentBuilder
from pipeline.planner.sizes import SegmentSizes
from pipeline.planner.timing import Work
from pipeline.planner.tokens import TemplateTokens, TokenEstimator
from pipeline.planner.validate import Validator
from pipeline.ports import World
from schemas.errors import RowErrorCode
from schemas.job import Job


@dataclass(frozen=True, slots=True)
class InputEstimate:
    """What an input amounts to; tokens are of the unique requests.

    Attributes:
        rows: lines that get a result.  rejected: of them, refused; `reasons` says how many for which reason.
        unique: requests to compute.  shards: that would be cut.
        prompt_tokens: counted when `exact`, else estimated.  shared_prefix_tokens: of them, computed once already.
        expected_tokens: of all answers.  max_tokens: the most that they can have.
        tokens_of_models: prompts and expected answers, by the name of their model.
        work: what the time depends on.
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
    work: Work = field(default_factory=Work)

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
) -> InputEstimate:
    """Read and validate an input as planning would.

    Args:
        counter: tokens of a text, by the model's tokenizer.  exact: count every prompt, not a sample.
        template: what the chat template adds; None: a rule of thumb.
    Raises:
        InputError: the input can't be read.
    """
    estimator = TokenEstimator(counter, exact=exact, template=template or TemplateTokens())
    settings = job.settings.plan
    models = [model.name for model in job.models]
    reasons: Counter[RowErrorCode] = Counter()
    totals: Counter[str] = Counter()
    of_models: Counter[str] = Counter()
    builder = SegmentBuilder(None, models)
    sizes = SegmentSizes.of(settings)
    work: list[Work] = []

    def close() -> None:
        plan = builder.finish(settings, None)
        totals["unique"] += plan.unique
        totals["max_tokens"] += plan.max_tokens
        totals["prompt_tokens"] += plan.prompt_tokens
        totals["expected_tokens"] += plan.expected_tokens
        totals["shared_bytes"] += plan.shared_bytes
        totals["prefix_groups"] += plan.prefix_groups
        totals["shards"] += len(plan.ranges)
        work.append(plan.work(estimator.bytes_to_tokens(plan.shared_bytes), builder.certain_tokens))
        of_models.update(plan.tokens_of_models())

    with tempfile.TemporaryDirectory(prefix="estimate-", dir=world.scratch) as folder:
        validator = Validator(job, SeenIds(Path(folder)), estimator)
        for batch in limited(source.batches(sizes), job.settings.limit):
            checked = validator.check(batch)
            reasons.update(rejected.error.code for rejected in checked.rejected)
            totals["rows"] += len(batch.rows)
            totals["blank"] += batch.end_row - batch.first_row - len(batch.rows)
            builder.add(checked)
            if batch.end_row == sizes.end(batch.first_row):
                close()
                builder = SegmentBuilder(None, models)
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
        exact=exact and counter is not None,
        tokens_of_models=dict(of_models),
        work=sum(work, Work()),
    )
