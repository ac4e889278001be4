"""Calls over Ray datasets and Spark frames: the same call in each process that has blocks of the table.

The call is checked first, over a table without rows, which also gives the types of the new columns.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import pyarrow as pa

from tokenmill.errors import InvalidCall
from tokenmill.frames.arguments import name_arguments
from tokenmill.frames.interrupts import interrupts_plainly
from tokenmill.frames.options import engine_names
from tokenmill.frames.resident import ResidentModel, load_model

BLOCK_ROWS: Final = 1_000
"""Rows that are one job: prompts share prefixes within it, and what is computed again if its process dies."""

P = ParamSpec("P")
R = TypeVar("R")
Call = Callable[..., Any]
"""`tokenmill.map` or one of its siblings."""


def runs_where_data_lies(function: Callable[P, R]) -> Callable[P, R]:
    """A call that runs in a cluster's processes if its data lie there, and else in this process."""

    @interrupts_plainly
    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        given = name_arguments(function, args, keywords)
        data = given.pop("data")
        run = _cluster_of(data)
        return function(data, **given) if run is None else run(call, data, given)

    return call


def _cluster_of(data: Any) -> Callable[[Call, Any, dict[str, Any]], Any] | None:
    """How to run a call over the data; None: in this process. No library is imported that the caller has not."""
    modules = {base.__module__ for base in type(data).__mro__}
    if "ray.data.dataset" in modules and "ray" in sys.modules:
        from tokenmill.frames.clusters.ray_data import map_dataset

        return map_dataset
    if any(name.startswith("pyspark.sql.") for name in modules) and hasattr(data, "mapInArrow"):
        from tokenmill.frames.clusters.spark import map_frame

        return map_frame
    return None


def check_call(function: Call, columns: pa.Schema, keywords: Mapping[str, Any]) -> pa.Schema:
    """Check a call over a table with these columns; returns those of the result. Raises `InvalidCall`, and as the
    call."""
    if isinstance(keywords.get("model"), ResidentModel):
        raise InvalidCall("model: each process loads its own; give the model's name")
    for name in ("root", "url"):
        if keywords.get(name) is not None:
            raise InvalidCall(
                f"{name}: this table is computed where it lies; give one of this process to an installation"
            )
    if keywords.get("dry_run"):
        raise InvalidCall("dry_run: can't estimate a table that lies on a cluster; estimate a sample of it")
    if not isinstance(keywords.get("reuse"), str | os.PathLike | None):
        raise InvalidCall("reuse: must be a path that all processes can read")
    answered = function(columns.empty_table(), **keywords)
    assert isinstance(answered, pa.Table)
    return answered.schema


class BlockMapper:
    """Computes blocks with a model that stays loaded in this process.

    Args:
        function, keywords: the call, checked by `check_call`. With an `output_dir` each block has a folder there, named
            by its content, so that a block that is computed again goes on.
    """

    def __init__(self, function: Call, keywords: Mapping[str, Any]) -> None:
        engine = {name: value for name, value in keywords.items() if name in engine_names()}
        self._function = function
        self._keywords = {name: value for name, value in keywords.items() if name not in engine and name != "model"}
        self._folder = self._keywords.pop("output_dir", None)
        self._model = load_model(keywords["model"], **engine)

    def __call__(self, block: pa.Table) -> pa.Table:
        """The block with its new columns."""
        given = dict(self._keywords)
        if self._folder is not None:
            given["output_dir"] = Path(self._folder) / _digest(block)
        return self._function(block, model=self._model, **given)


def _digest(block: pa.Table) -> str:
    digest = hashlib.sha256()
    for batch in block.combine_chunks().to_batches():
        digest.update(batch.serialize())
    return digest.hexdigest()[:32]
