"""Limits on what a request may ask for and on how a job is cut: part of a job, so that planning it twice gives the
same plan."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, strict=False)]  # not strict: environment variables are text


class Limits(BaseModel):
    """What an input and its lines may hold.

    Attributes:
        max_rows: of an input, all of its files together; blank lines count. A job of more fails.
        max_line_bytes: a longer line is an invalid_json row; it is skipped, never held in memory whole.
        max_carried_bytes: most bytes of a Parquet row's columns that are carried through to the results.
        max_json_depth: deepest nesting of brackets, counted before anything is parsed.
        max_custom_id_chars: longest custom_id.
        max_stop_sequences: most stop strings (OpenAI takes 4, vLLM any number) and most stop_token_ids.
        max_choices: largest `n`.
        max_embedding_inputs: most texts of one request for embeddings.
        max_embedding_tokens: most tokens of them together.
        max_tools: most functions in `tools`.
        max_schema_bytes: largest schema, regex or grammar of a request, and all schemas of its tools together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: Positive = 100_000_000
    max_line_bytes: Positive = 10 * 1024 * 1024
    max_carried_bytes: Positive = 256 * 1024
    max_json_depth: Positive = 64
    max_custom_id_chars: Positive = 512
    max_stop_sequences: Positive = 16
    max_choices: Positive = 128
    max_embedding_inputs: Positive = 2_048
    max_embedding_tokens: Positive = 300_000
    max_tools: Positive = 128
    max_schema_bytes: Positive = 262_144


class RateLimits(BaseModel):
    """How much may be asked for over HTTP. None: no limit.

    Attributes:
        requests_per_minute: of any kind.
        tokens_per_minute: prompts, as they are estimated, and the most that may be answered, of requests to a model.
        running_requests: to a model, at once.  running_rows: their answers, at once: a request with `n` has so many.
        running_jobs: of the tenant, at once; further ones are not taken.
        stored_bytes, stored_files: of the tenant's files, results among them; further uploads are not taken.
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
        """These, and where they say nothing the others."""
        return others.model_copy(update=self.model_dump(exclude_none=True))


class SpendLimits(BaseModel):
    """What a tenant's jobs may cost, in the currency of the prices. None: no limit.

    Attributes:
        per_day, per_month: by the calendar, UTC. A shard counts when it is committed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_day: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    per_month: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def __bool__(self) -> bool:
        return self.per_day is not None or self.per_month is not None


class PlanSettings(BaseModel):
    """How a job is cut into segments and shards.

    Attributes:
        segment_rows: most input rows planned together; copies and prefix groups are found within a segment.
        first_segment_rows: rows of the first segment; each next one has twice as many, up to the most. Work begins
            when the first one stands.
        shard_tokens: estimated tokens (prompt and answer) a shard aims at: a minute or two of work.
        max_shard_rows: most rows a shard computes; copies come on top.
        min_group_rows: a prefix group of fewer rows is never split between shards.
        max_copies: most copies of one request that wait for one answer; the next one is computed again.
        min_prefix_bytes: a shared prefix of fewer bytes of text is not worth a group.
        answer_fraction: the part of max_tokens that an answer is expected to use, unless it ignores end tokens.
        max_invalid_errors: how many errors are listed when invalid lines stop a job.
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
