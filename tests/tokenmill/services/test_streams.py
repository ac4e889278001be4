"""Many concurrent streams over real processes: each is complete and in order, though other clients leave or stall."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks.process_meter import sample
from tests.cluster.lane_cluster import LaneCluster, dropped, lane_cluster, readers
from tests.cluster.null_worker import read_running
from tests.cluster.stream_clients import Kind, Plan, report_of, run_clients
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

READS, STALLS, LEAVES = 160, 20, 20
CHOICES = 8
"""Choices of clients that will stop reading, so that more is written to them."""
ROWS = READS + STALLS * CHOICES + LEAVES
SMALL = {"TOKENMILL_GATEWAY__MAX_STREAM_BUFFER_BYTES": "8192", "TOKENMILL_GATEWAY__MAX_UNSENT_BYTES": "8192"}
"""Buffers that a stream of this test fills."""
MOST_GROWTH = 8_000_000


@pytest.fixture
def cluster(tmp_path: Path, redis_server: RedisServer, model_folder: Path) -> Iterator[LaneCluster]:
    engine = ("--model", f"null={model_folder}", "--max-num-seqs", ROWS, "--step-ms", 30)
    with lane_cluster(tmp_path / "cluster", engine, redis_server, **SMALL) as cluster:
        yield cluster


def kinds(seed: int) -> list[Kind]:
    found: list[Kind] = ["reads"] * READS
    found += ["stalls"] * STALLS
    found += ["leaves"] * LEAVES
    Random(seed).shuffle(found)
    return found


@pytest.mark.exhaustive  # all streams must run at the same moment, which a busy machine may never reach
def test_of_two_hundred_streams_those_that_hang_up_or_stop_reading_end_alone(
    cluster: LaneCluster, model_folder: Path
) -> None:
    cluster.start("gateway-1", "worker-1")
    streams = readers(model_folder, kinds(7), tokens=400, ramp=1.0, until=2.5, n=CHOICES)
    clients = run_clients(Plan(cluster.url("gateway-1"), tuple(streams), wake=3.0))
    wait_for(lambda: read_running(cluster.meters) == ROWS, "they are not all computed at once")
    before = memory(cluster)
    wait_for(lambda: len(dropped(cluster.log("worker-1"))) == STALLS + LEAVES, "the worker goes on with them")
    wait_for(lambda: read_running(cluster.meters) == READS, "the engine goes on with them")
    growth = memory(cluster) - before
    seen = report_of(clients)

    assert [(number, one.wrong) for number, one in enumerate(seen) if one.wrong] == []
    assert [one.code for one in seen if one.kind == "stalls"] == ["stream_overrun"] * STALLS
    freed = dropped(cluster.log("worker-1"))
    assert {one.stream for one in seen if one.kind == "leaves"} <= freed.keys(), (
        "a caller who had hung up was computed for"
    )
    assert growth < MOST_GROWTH, "what waits for those who don't read is not bounded"


def memory(cluster: LaneCluster) -> int:
    """Bytes of the gateway."""
    found = sample(cluster.processes["gateway-1"].pid)
    assert found is not None
    return found.rss
