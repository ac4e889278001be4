"""pandas, polars, DuckDB and pyarrow open the results folder at every moment of a run: each request at most once, never
an error, and in the end every request exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.worker_client.shard_client import ShardClient
from tests.pipeline.made_jobs import MODELS, computed, plan_by_hand, report

Reader = Callable[[Path], Sequence[int]]

READERS: dict[str, Reader] = {
    "pandas": lambda folder: pd.read_parquet(folder)["row"].tolist(),
    "polars": lambda folder: pl.read_parquet(folder)["row"].to_list(),
    "polars lazy": lambda folder: pl.scan_parquet(folder / "*.parquet").select("row").collect()["row"].to_list(),
    "duckdb": lambda folder: duckdb.connect().read_parquet(f"{folder}/*.parquet").fetchnumpy()["row"].tolist(),
    "pyarrow": lambda folder: pq.read_table(folder)["row"].to_pylist(),
    "pyarrow dataset": lambda folder: ds.dataset(folder).to_table(columns=["row"])["row"].to_pylist(),
}
SHARDS = 12
ROWS = 5


@pytest.mark.slow
@pytest.mark.parametrize("name", list(READERS))
def test_readers_see_only_whole_parts_while_they_are_committed(name: str, tmp_path: Path) -> None:
    read, seen, errors, done = READERS[name], [0], [], threading.Event()
    with FolderStore(tmp_path / "out") as store:
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store)
        shards = [list(range(first, first + ROWS)) for first in range(2, 2 + SHARDS * ROWS, ROWS)]
        plan_by_hand(ledger, world, shards, rejected=[0, 1])
        queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 60.0)
        dispatcher = Dispatcher(world, queue, beats)
        dispatcher.add(ledger)
        client = ShardClient("w", world, lambda _: ledger, queue, beats, dispatcher.finished, models=MODELS)

        def keep_reading() -> None:
            while not done.is_set():
                try:
                    rows = read(tmp_path / "out" / "results")
                except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
                    errors.append(error)
                    return
                if len(set(rows)) != len(rows) or len(rows) < seen[-1] or (len(rows) - 2) % ROWS:
                    errors.append(AssertionError(rows))
                    return
                seen.append(len(rows))

        reader = threading.Thread(target=keep_reading)
        reader.start()
        try:
            while not dispatcher.finished():
                dispatcher.tick()
                while (work := client.take(0)) is not None:
                    before = len(seen)
                    assert client.commit(work, computed(work), report(work))
                    while len(seen) == before and not errors:  # at least one look between two commits
                        done.wait(0.001)
        finally:
            done.set()
            reader.join()
    assert not errors, errors
    assert len(set(seen)) > SHARDS // 2, "the reader was too slow to see anything"
    assert sorted(read(tmp_path / "out" / "results")) == list(range(2 + SHARDS * ROWS))
    assert {path.name[:5] for path in (tmp_path / "out" / "results").iterdir()} == {"part-"}


def test_types_are_as_promised(tmp_path: Path) -> None:
    with FolderStore(tmp_path) as store:
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store)
        plan_by_hand(ledger, world, [], rejected=[])
    frame = pl.read_parquet(tmp_path / "results")
    assert len(frame) == 0
    assert frame.schema["row"] == pl.Int64
    assert frame.schema["embedding"] == pl.List(pl.Float32)
    assert frame.schema["created_at"] == pl.Datetime("us", "UTC")
    found = duckdb.connect().execute("describe select * from read_parquet(?)", [f"{tmp_path}/results/*"]).fetchall()
    assert {name: kind for name, kind, *_ in found}["finished_at"] == "TIMESTAMP WITH TIME ZONE"
