"""Arrow schemas of the stored tables: shards (private) and results (public)."""

from __future__ import annotations

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")
CARRIED_PREFIX = "input_"

RESULT_FIELDS: tuple[pa.Field, ...] = (
    pa.field("custom_id", pa.string()),
    pa.field("row", pa.int64(), nullable=False),
    pa.field("status", pa.string(), nullable=False),
    pa.field("status_code", pa.int32(), nullable=False),
    pa.field("text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("response", pa.string()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
    pa.field("model", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("cached_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
    pa.field("embedding", pa.list_(pa.float32())),
    pa.field("created_at", TIMESTAMP),
    pa.field("started_at", TIMESTAMP),
    pa.field("finished_at", TIMESTAMP),
    pa.field("attempt", pa.int32()),
    pa.field("reasoning", pa.string()),
    pa.field("truncated_tokens", pa.int32()),
    pa.field("content_policies", pa.string()),
    pa.field("served_by", pa.string()),  # the model that computed the row; `model` is the requested name
    pa.field("request_key", pa.string()),  # in hex, see `schemas.requests.request_key`; null: the line was refused
    pa.field("reused_from", pa.string()),  # the id of the job that computed the answer, if another one did
    pa.field("tries", pa.int32()),  # of an answer that was judged (`JobSettings.max_tries`); null: it was not
)

SHARD_FIELDS: tuple[pa.Field, ...] = (
    pa.field("row", pa.int64(), nullable=False),  # 0-based index of the line in the input
    pa.field("compute_row", pa.int64(), nullable=False),  # the row whose answer this one takes; its own when computed
    pa.field("custom_id", pa.string(), nullable=False),
    pa.field("url", pa.string(), nullable=False),
    pa.field("body", pa.string(), nullable=False),  # the validated body as JSON; empty for copies
    pa.field("model", pa.string(), nullable=False),
    pa.field("request_hash", pa.binary(16), nullable=False),  # its key, see `schemas.requests.request_key`
    pa.field("prefix_group", pa.int64()),  # null: shares no known prefix
    pa.field("prefix_readers", pa.int32()),  # requests after this one that begin with the group's prefix
    pa.field("estimated_prompt_tokens", pa.int32(), nullable=False),
    pa.field("expected_tokens", pa.int32(), nullable=False),  # of the answer
)


def result_schema(carried: pa.Schema | None = None) -> pa.Schema:
    """The fixed schema of every part of a job; `carried` are the extra columns of a Parquet input, prefixed where their
    names are those of results or of shards, which have the same columns."""
    names = {field.name for field in (*RESULT_FIELDS, *SHARD_FIELDS)}
    extra: list[pa.Field] = []
    for field in carried or ():
        name = field.name
        while name in names:
            name = CARRIED_PREFIX + name
        names.add(name)
        extra.append(pa.field(name, field.type))
    return pa.schema([*RESULT_FIELDS, *extra])


def shard_schema(carried: pa.Schema | None = None) -> pa.Schema:
    """Schema of a shard file: the fixed columns, then the carried ones under their result names."""
    return pa.schema([*SHARD_FIELDS, *list(result_schema(carried))[len(RESULT_FIELDS) :]])
