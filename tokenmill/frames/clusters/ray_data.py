"""Calls over a Ray dataset: an actor pool, each actor with a model of its own."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.clusters.blocks import BLOCK_ROWS, BlockMapper, Call, check_call
from tokenmill.frames.options import EngineKeywords, check_options


def map_dataset(function: Call, dataset: Any, keywords: dict[str, Any]) -> Any:
    """The dataset with new columns. It is lazy, as Ray's are: actors compute it when it is read, and Ray computes the
    blocks of an actor that dies again. `concurrency` of the keywords is the number of actors (1).

    Raises:
        InvalidCall: the dataset's columns aren't known, or as the call.
    """
    actors = keywords.pop("concurrency", 1)
    check_options({"concurrency": actors}, EngineKeywords)
    schema = dataset.schema()
    columns = None if schema is None else schema.base_schema
    if not isinstance(columns, pa.Schema):
        raise InvalidCall("data: the columns of this Ray dataset aren't known; call .materialize() first")
    check_call(function, columns, keywords)
    return dataset.map_batches(
        BlockMapper, fn_constructor_args=(function, keywords), batch_format="pyarrow", batch_size=BLOCK_ROWS,
        concurrency=actors, num_gpus=_gpus(keywords),
    )  # fmt: skip


def _gpus(keywords: dict[str, Any]) -> float | None:
    """GPUs of an actor."""
    import ray

    if keywords.get("device", "auto") == "cpu" or not ray.cluster_resources().get("GPU"):
        return None
    return float(keywords.get("tensor_parallel", 1) * keywords.get("pipeline_parallel", 1))
