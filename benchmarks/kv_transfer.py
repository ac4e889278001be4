"""Transfers of KV blocks between two processes of one machine: by TCP, and in shared memory.

    python benchmarks/kv_transfer.py --mebibytes 256 --block-kib 1024 --rounds 7

The blocks are random bytes. Both ways alternate; each transfer is verified as a worker does (`workers.kv_transfer`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.throughput import machine
from engine.block_exchange import ExportedBlock
from engine.cache.block_tier import BlockKey
from pipeline.adapters.system_clock import SystemClock
from schemas.settings.kv_transfer import KVTransferOptions
from workers.kv_transfer.client import BlockClient
from workers.kv_transfer.server import BlockServer
from workers.kv_transfer.wire import Expected

IDENTITY = bytes(32)


def names(count: int) -> list[BlockKey]:
    return [BlockKey(0, number.to_bytes(16, "big"), bytes(128)) for number in range(count)]


def serve(line: Connection, count: int, size: int) -> None:
    """Offer the same blocks for each request on the line, until it says no more."""
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    blocks = [ExportedBlock(key, index, size, lambda: data) for index, key in enumerate(names(count))]
    options = KVTransferOptions(max_bytes=2 * count * size, timeout_seconds=60.0)
    with BlockServer(IDENTITY, SystemClock(), options).running() as server:
        while line.recv():
            line.send(server.offer(blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of one transfer")
    parser.add_argument("--block-kib", type=int, default=1024, help="of a block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    size = args.block_kib << 10
    count = (args.mebibytes << 20) // size
    line, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, count, size))
    process.start()
    clients = {name: BlockClient(60.0, use_shared_memory=name != "tcp") for name in ("tcp", "shared memory")}
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(args.rounds + 1):
        for name, client in clients.items():
            line.send(True)
            source = line.recv()
            began = time.perf_counter()
            found = client.fetch(source, Expected(names(count), (size,), IDENTITY))
            seconds = time.perf_counter() - began
            if len(found) != count:
                raise SystemExit(f"{name}: {len(found)} of {count} blocks arrived")
            if turn:  # the first one touches new memory
                rates[name].append(count * size / seconds / 1e9)
    line.send(False)
    process.join()
    result: dict[str, Any] = {"machine": machine(), "bytes": count * size, "block_bytes": size, "gb_s": rates}
    for name, found_rates in rates.items():
        low, high = min(found_rates), max(found_rates)
        print(f"{name}: {statistics.median(found_rates):.2f} GB/s ({low:.2f} to {high:.2f})")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
