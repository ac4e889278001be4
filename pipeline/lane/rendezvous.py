"""Rendezvous hashing with bounded loads: which worker gets a request, from the hash of its prefix alone.

All callers choose the same worker for a prefix without talking to each other, and when a worker joins or leaves, only
the prefixes that it gets or had move.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking
6(1), 1998 (highest random weight); Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA
2018 (a bin that is full passes on to the next one; theirs is a ring, here it is the next weight).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import NamedTuple


class WorkerChoice(NamedTuple):
    """A chosen worker. `is_preferred`: it is the prefix's own; else the own one had as many requests as it may have."""

    worker: str
    is_preferred: bool


def rank_workers(key: bytes, workers: Collection[str]) -> list[str]:
    """The workers in the order in which requests with this key (at most 64 bytes) prefer them."""
    weights = {worker: blake2b(worker.encode(), digest_size=8, key=key).digest() for worker in workers}
    return sorted(weights, key=lambda worker: (weights[worker], worker), reverse=True)


def max_open_requests(open_requests: Mapping[str, int], max_load_ratio: float) -> int:
    """How many open requests a worker may have with the next one, which is counted in the mean."""
    return math.ceil(max_load_ratio * (sum(open_requests.values()) + 1) / len(open_requests))


def choose_worker(key: bytes, open_requests: Mapping[str, int], max_load_ratio: float) -> WorkerChoice:
    """Choose the worker of the next request.

    Args:
        key: of the request's prefix, at most 64 bytes.
        open_requests: number of the caller's open requests at each worker, 0 included; at least one worker.
        max_load_ratio: at least 1; no worker gets more than this multiple of the mean, rounded up.
    """
    bound = max_open_requests(open_requests, max_load_ratio)
    ranked = rank_workers(key, open_requests)
    worker = next(worker for worker in ranked if open_requests[worker] < bound)
    return WorkerChoice(worker, worker == ranked[0])
