"""Tools of the planner's tests: lines, a sink in memory, and a plan made from bytes."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.planner import PlanSummary, RowSource, SourceFile, StoredShard, open_source, plan
from pipeline.ports import ObjectStore, World
from schemas.jobs.arrow_schemas import result_schema, shard_schema
from schemas.jobs.inputs import InputFile, InputFormat, InputRef
from schemas.jobs.job import Job, JobSettings
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from schemas.requests.limits import Limits

NOW = datetime(2026, 1, 2, tzinfo=UTC)


class MemorySink:
    """A `PlanSink` that stores everything in memory; `standing`: segments that were committed before."""

    def __init__(self, carried: pa.Schema | None, standing: dict[int, PlanSegment] | None = None) -> None:
        self._carried = carried
        self.standing = dict(standing or {})
        self.shards: dict[int, pa.Table] = {}
        self.rejected: list[pa.Table] = []
        self.rejects: dict[int, list[pa.Table]] = {}
        self._stored = 0
        self.committed: list[PlanSegment] = []

    def existing_segment(self, index: int) -> PlanSegment | None:
        return self.standing.get(index)

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        assert number not in self.shards
        assert table.schema.equals(shard_schema(self._carried))
        table.validate(full=True)
        self.shards[number] = table
        data = repr(table.to_pydict()).encode()
        return StoredShard(f"shards/{number}", hashlib.sha256(data).hexdigest(), len(data))

    def reused_keys(self, segment: PlanSegment) -> list[bytes]:
        return []

    def write_results(self, table: pa.Table) -> None:
        assert table.schema.equals(result_schema(self._carried))
        table.validate(full=True)
        self.rejected.append(table)

    def store_results(self, number: int) -> StoredShard:
        self.rejects[number] = self.rejected[self._stored :]
        self._stored = len(self.rejected)
        return StoredShard(f"rejects/{number}", "0" * 64, 0)

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        self.committed.append(segment)
        return self.standing.setdefault(segment.index, segment)


@dataclass
class PlanResult:
    """The segments, shards and refused rows of a plan."""

    summary: PlanSummary
    sink: MemorySink
    shards: dict[int, list[dict[str, Any]]] = field(init=False)
    rejected: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.shards = {number: table.to_pylist() for number, table in self.sink.shards.items()}
        self.rejected = [row for table in self.sink.rejected for row in table.to_pylist()]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows in shards, in running order."""
        return [row for number in sorted(self.shards) for row in self.shards[number]]

    @property
    def error_of(self) -> dict[int, tuple[str, str]]:
        """Code and message of each refused row."""
        return {row["row"]: (row["error_code"], row["error_message"]) for row in self.rejected}


class Tools:
    """Everything a test of the planner needs; has no state between calls."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @staticmethod
    def line(custom_id: object = "a", content: object = "hi", **body: Any) -> bytes:
        """A chat line, greedy unless `body` says otherwise."""
        messages = [{"role": "user", "content": content}]
        fields = {"model": "demo", "messages": messages, "temperature": 0} | body
        line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": fields}
        return json.dumps(line, ensure_ascii=False).encode()

    @staticmethod
    def job(*, models: tuple[str, ...] = ("demo",), **settings: Any) -> Job:
        pins = tuple(ModelPin(name=name, source=name, dtype="float32") for name in models)
        files = (InputFile(uri="in.jsonl", size=0),)
        return Job(
            id="job",
            input=InputRef(uri="in.jsonl", format=InputFormat.JSONL, files=files),
            models=pins,
            settings=JobSettings(**settings),
            created_at=NOW,
        )

    @staticmethod
    def files(*contents: bytes, opener: Callable[[bytes], BinaryIO] = io.BytesIO) -> list[SourceFile]:
        return [SourceFile(f"file-{n}.jsonl", lambda data=data: opener(data)) for n, data in enumerate(contents)]

    def source(self, *contents: bytes, limits: Limits | None = None) -> RowSource:
        return open_source(self.files(*contents), InputFormat.JSONL, limits or Limits())

    def plan(
        self, source: RowSource | bytes, job: Job | None = None, *, sink: MemorySink | None = None, **kwargs: Any
    ) -> PlanResult:
        """Plan `source` (or the bytes of one JSONL file) into memory."""
        job = job or self.job()
        if isinstance(source, bytes):
            source = self.source(source, limits=job.settings.limits)
        sink = sink or MemorySink(source.carried)
        with self.world() as world:
            return PlanResult(plan(source, job, sink, world, attempt="planner-1", **kwargs), sink)

    @staticmethod
    def sink(carried: pa.Schema | None = None, standing: dict[int, PlanSegment] | None = None) -> MemorySink:
        return MemorySink(carried, standing)

    @contextmanager
    def world(self) -> Iterator[World]:
        """A world with an empty scratch folder, which must be empty again at the end."""
        with tempfile.TemporaryDirectory() as folder:
            yield World(self._store, SystemClock(), SystemRandomness(), Path(folder))
            left = [path.name for path in Path(folder).iterdir()]
            assert not left, f"the planner left {left} in its scratch folder"


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    with FolderStore(tmp_path_factory.mktemp("store")) as store:
        yield Tools(store)
