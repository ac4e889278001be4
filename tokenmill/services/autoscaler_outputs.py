"""Outputs of the autoscaler's decisions: lines for people, JSON over HTTP for KEDA, and metrics for Prometheus."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

from pipeline.observability.samples import Samples
from pipeline.scaling.autoscaler import PoolDecision
from pipeline.scaling.backlog import BacklogMetrics
from tokenmill import output

PATH: Final = "/autoscale"


def described(one: PoolDecision) -> dict[str, Any]:
    """A decision for programs. `desired` is the number to scale to."""
    seen, decision = one.observed, one.decision
    return {
        "pool": one.pool,
        "desired": decision.desired,
        "before": decision.before,
        "reason": decision.reason,
        "live": seen.live,
        "starting": sum(start.count for start in decision.memory.starting),
        "work_seconds": round(seen.work, 3),
        "work_seconds_per_worker": round(one.work_per_worker, 3),
        "oldest_wait_seconds": round(max((demand.waited for demand in seen.demands), default=0.0), 3),
        "for_deadlines": decision.hard,
        "ahead_of_need": decision.ahead,
        "with_work": decision.retained,
        "ttft_p95_seconds": seen.ttft_p95,
        "goodput": seen.goodput,
        "callers": seen.callers,
        "callers_waiting": seen.callers_waiting,
        "kv_used": seen.kv_used,
        "changes_within_the_hour": len(decision.memory.changed),
    }


class DecisionPrinter:
    """Prints decisions to stdout: a line for each pool, or a JSON line for each decision over all pools."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def put(self, _metrics: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        """Print them."""
        if self._as_json:
            print(json.dumps({"pools": [described(one) for one in decisions]}), flush=True)
            return
        for one in decisions:
            seen = one.observed
            work = output.duration(seen.work) if seen.work else "no"
            print(
                f"{one.pool}: {one.decision.before} -> {one.desired} workers ({one.decision.reason}); "
                f"{seen.live} live, {work} work",
                flush=True,
            )


class DecisionEndpoint:
    """Serves the last decisions at `/autoscale` (all pools) and `/autoscale/POOL` (one), for KEDA's metrics-api scaler
    (valueLocation "desired", targetValue "1"), and as metrics. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: tuple[PoolDecision, ...] = ()

    def put(self, _metrics: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        """Store them."""
        with self._lock:
            self._decisions = tuple(decisions)

    def document(self, path: str) -> bytes | None:
        """The JSON at a path; None for an unknown pool, which must not be taken for one without workers."""
        with self._lock:
            decisions = self._decisions
        if path == PATH and decisions:
            return json.dumps({"pools": [described(one) for one in decisions]}).encode()
        if path.startswith(f"{PATH}/"):
            name = unquote(path.removeprefix(f"{PATH}/"))
            return next((json.dumps(described(one)).encode() for one in decisions if one.pool == name), None)
        return None

    def write_samples(self, samples: Samples) -> None:
        """Write the metrics."""
        with self._lock:
            decisions = self._decisions
        for one in decisions:
            samples.value("tokenmill_desired_workers", one.desired, one.pool)
