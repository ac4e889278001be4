"""Calls over a Spark frame: `mapInArrow`, with one model in each Python worker."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from tokenmill.errors import InvalidCall
from tokenmill.frames.clusters.blocks import BLOCK_ROWS, BlockMapper, Call, check_call


def map_frame(function: Call, frame: Any, keywords: dict[str, Any]) -> Any:
    """The frame with new columns. It is lazy, as Spark's are, and each action computes it anew unless it is cached.
    Enums are strings.

    Raises:
        InvalidCall: as the call; `concurrency` is given.
    """
    if "concurrency" in keywords:
        raise InvalidCall("concurrency: is of Ray datasets; Spark's executors and their cores decide here")
    schema = _storable(check_call(function, to_arrow_schema(frame.schema), keywords))
    call = cloudpickle.dumps((function, keywords))

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mapper = _mapper(call)
        for block in _blocks(batches):
            yield from mapper(block).cast(schema).to_batches()

    return frame.mapInArrow(answer, from_arrow_schema(schema))


@lru_cache(maxsize=1)
def _mapper(call: bytes) -> BlockMapper:
    """One model in this process: Spark's Python workers compute many tasks."""
    function, keywords = cloudpickle.loads(call)
    return BlockMapper(function, keywords)


def _blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of at least `BLOCK_ROWS`, but for the last."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.num_rows for one in held) >= BLOCK_ROWS:
            yield pa.Table.from_batches(held)
            held = []
    if any(batch.num_rows for batch in held):
        yield pa.Table.from_batches(held)


def _storable(schema: pa.Schema) -> pa.Schema:
    """The columns with types that Spark has."""
    return pa.schema([field.with_type(_type(field.type)) for field in schema])


def _type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _type(kind.value_type)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_type(field.type)) for field in kind])
    return kind
