"""External observation of a job while its process runs, is stopped, or is dead: by its files only."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq

from pipeline.results.part_files import FOOTER_KEY
from schemas.jobs.checkpoints import CheckpointHead, decode

REFUSED = "part-00000.parquet"
"""The rows refused in planning: this part is committed before anything is computed."""


class DurableTokens:
    """The tokens that a job's folder holds durably, counted from its files alone. None of them ever changes, so each is
    read once."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._heads: dict[Path, CheckpointHead | None] = {}
        self._parts: dict[Path, int] = {}

    def count(self) -> int:
        """Sampled tokens in committed parts, and in the checkpoints of open shards."""
        logged: defaultdict[int, dict[str, int]] = defaultdict(dict)
        for head in self._standing():  # before the parts are listed: a part stands before its checkpoints go
            known = logged[head.shard]
            known[head.attempt_id] = max(known.get(head.attempt_id, 0), head.generated)
        committed = {int(path.stem.removeprefix("part-")): self._sampled(path) for path in parts(self._out)}
        rest = sum(sum(known.values()) for shard, known in logged.items() if shard not in committed)
        return sum(committed.values()) + rest

    def interval(self) -> int:
        """The most tokens that lay between two checkpoints, as far as checkpoints were seen."""
        return max((head.exposed for head in self._heads.values() if head is not None), default=0)

    def _standing(self) -> list[CheckpointHead]:
        heads = (self._head(path) for path in self._out.glob("work/*/*-*[0-9]"))
        return [head for head in heads if head is not None]

    def _head(self, path: Path) -> CheckpointHead | None:
        if path not in self._heads:
            try:
                self._heads[path] = decode(path.read_bytes()).head
            except FileNotFoundError:  # its shard has just been committed
                return None
        return self._heads[path]

    def _sampled(self, path: Path) -> int:
        if path not in self._parts:
            footer = json.loads(pq.read_metadata(path).metadata[FOOTER_KEY.encode()])
            self._parts[path] = sum(footer.get("accounted", {}).values())
        return self._parts[path]


def parts(out: Path) -> list[Path]:
    """The committed parts, as files."""
    return sorted(out.glob("results/*.parquet"))


def digests(out: Path) -> dict[str, str]:
    """The committed parts, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in parts(out)}


def read_with_every_reader(out: Path) -> int:
    """Open the results with every reader and count the rows, each of which stands once. 0: there are none yet."""
    folder = out / "results"
    if not parts(out):
        return 0
    # A part may be committed between two readers, so each is judged by itself.
    with duckdb.connect() as database:
        seen = {"duckdb": [row[0] for row in database.sql(f"select row from '{folder}/*.parquet'").fetchall()]}  # noqa: S608
    seen["pyarrow"] = pq.read_table(folder)["row"].to_pylist()
    seen["pandas"] = pd.read_parquet(folder)["row"].tolist()
    seen["polars"] = pl.read_parquet(folder)["row"].to_list()
    for reader, rows in seen.items():
        assert len(set(rows)) == len(rows), f"{reader} sees a row twice"
    return len(seen["polars"])


def answers(out: Path) -> dict[int, tuple[Any, ...]]:
    """The comparable columns: all but times and cached tokens."""
    found = {}
    for row in pq.read_table(out / "results").to_pylist():
        texts = None
        if row["response"] is not None:
            choices = json.loads(row["response"])["choices"]
            messages = [choice.get("message", {"content": choice.get("text")}) for choice in choices]
            texts = [(message["content"], message.get("reasoning_content")) for message in messages]
        found[row["row"]] = (row["custom_id"], row["status"], row["error_code"], row["completion_tokens"], texts)
    return found
