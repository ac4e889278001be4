"""Limits of requests, and the settings of planning. Both are stored in a job, so that planning it twice gives the same
plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, strict=False)]  # not strict: environment variables are text


class Limits(BaseModel):
    """Limits of an input and its lines.

    Attributes:
        max_rows: of an input, over all of its files; blank lines count. A larger job fails.
        max_line_bytes: a longer line is an invalid_json row; it is skipped without being held in memory.
        max_carried_bytes: most bytes of a Parquet row's columns that are carried through to the results.
        max_json_depth: deepest nesting of brackets, counted before anything is parsed.
        max_custom_id_chars: longest custom_id.
        max_stop_sequences: most stop strings (OpenAI takes 4, vLLM any number) and most stop_token_ids.
        max_allowed_token_ids: most `allowed_token_ids`; one that is named again doesn't count.
        max_bad_words, max_bad_word_chars: most `bad_words`, and the longest one.
        max_choices: largest `n`; most choices of one classification.
        max_prompts: most prompts of one request for completions, each counted `n` times.
        max_prompt_tokens: most tokens of these prompts in total, where there are several, and of what is tokenized.
        max_prompt_logprobs: most log-probabilities of prompt tokens in a response: of each token 1 and the number asked
            for, `n` times.
        max_embedding_inputs: most texts of one request for embeddings, scores or labels (a pair counts once).
        max_embedding_tokens: most tokens of them in total.
        max_tools: most functions in `tools`.
        max_schema_bytes: largest schema, regex or grammar of a request, and largest sum of its tools' schemas.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: Positive = 100_000_000
    max_line_bytes: Positive = 10 * 1024 * 1024
    max_carried_bytes: Positive = 256 * 1024
    max_json_depth: Positive = 64
    max_custom_id_chars: Positive = 512
    max_stop_sequences: Positive = 16
    max_allowed_token_ids: Positive = 200_000
    max_bad_words: Positive = 1_000
    max_bad_word_chars: Positive = 256
    max_choices: Positive = 128
    max_prompts: Positive = 2_048
    max_prompt_tokens: Positive = 1_000_000
    max_prompt_logprobs: Positive = 4_000_000
    max_embedding_inputs: Positive = 2_048
    max_embedding_tokens: Positive = 300_000
    max_tools: Positive = 128
    max_schema_bytes: Positive = 262_144


class RateLimits(BaseModel):
    """Rate limits and quotas of HTTP. None: no limit.

    Attributes:
        requests_per_minute: of any kind.
        tokens_per_minute: estimated prompt tokens plus the maximum answer tokens, of requests to a model.
        running_requests: concurrent requests to a model.  running_rows: their concurrent answers, `n` for a request.
        running_jobs: concurrent jobs of the tenant; further ones are refused.
        stored_bytes, stored_files: of the tenant's files, including results; further uploads are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    running_requests: Positive | None = None
    running_rows: Positive | None = None
    running_jobs: Positive | None = None
    stored_bytes: Positive | None = None
    stored_files: Positive | None = None

    def over(self, others: RateLimits) -> RateLimits:
        """These limits, with those of `others` where they are None."""
        return others.model_copy(update=self.model_dump(exclude_none=True))


class SpendLimits(BaseModel):
    """Spending limits of a tenant's jobs, in the currency of the prices. None: no limit.

    Attributes:
        per_day, per_month: by the calendar, UTC. A shard counts when it is committed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_day: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    per_month: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def __bool__(self) -> bool:
        return self.per_day is not None or self.per_month is not None


class PlanSettings(BaseModel):
    """Settings of the planner, which divides a job into segments and shards.

    Attributes:
        segment_rows: most input rows planned together; copies and prefix groups are found within a segment.
        first_segment_rows: rows of the first segment; each next one has twice as many, up to `segment_rows`. Computing
            begins when the first one is committed.
        shard_tokens: target size of a shard in estimated tokens (prompt and answer): a minute or two of work.
        max_shard_rows: most computed rows of a shard; copies are not counted.
        min_group_rows: a prefix group of fewer rows is never split between shards.
        max_copies: most copies of one request that share one answer; the next one is computed again.
        min_prefix_bytes: shared prefixes of fewer bytes of text form no group.
        answer_fraction: the expected share of max_tokens that an answer uses, unless it ignores end tokens.
        max_invalid_errors: most errors that are listed when invalid lines stop a job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    segment_rows: Positive = 100_000
    first_segment_rows: Positive = 10_000
    shard_tokens: Positive = 262_144
    max_shard_rows: Positive = 2_000
    min_group_rows: Positive = 256
    max_copies: Positive = 10_000
    min_prefix_bytes: Positive = 256
    answer_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_invalid_errors: Positive = 100
