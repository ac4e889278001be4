"""Where the autoscaler's decisions go: lines for people, JSON over HTTP for KEDA, and figures for Prometheus."""

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
        "with_work": decision.kept,
        "ttft_p95_seconds": seen.ttft_p95,
        "callers": seen.callers,
        "callers_waiting": seen.callers_waiting,
        "kv_used": seen.kv_used,
        "changes_within_the_hour": len(decision.memory.changed),
    }


class DecisionPrinter:
    """Tells stdout: a line for each pool, or a JSON document for each decision of all (a line each)."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def put(self, _figures: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
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
    """What was decided last, at `/autoscale` (all pools) and `/autoscale/POOL` (one), as KEDA's metrics-api scaler
    reads it (valueLocation "desired", targetValue "1"); and as a source of metrics. On any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: tuple[PoolDecision, ...] = ()

    def put(self, _figures: BacklogMetrics, decisions: Sequence[PoolDecision]) -> None:
        """Remember them."""
        with self._lock:
            self._decisions = tuple(decisions)

    def document(self, path: str) -> bytes | None:
        """What is at a path. A pool of which nothing is known is not one of no workers: there is nothing then."""
        with self._lock:
            decisions = self._decisions
        if path == PATH and decisions:
            return json.dumps({"pools": [described(one) for one in decisions]}).encode()
        if path.startswith(f"{PATH}/"):
            name = unquote(path.removeprefix(f"{PATH}/"))
            return next((json.dumps(described(one)).encode() for one in decisions if one.pool == name), None)
        return None

    def tell(self, told: Samples) -> None:
        """For `/metrics`."""
        with self._lock:
            decisions = self._decisions
        for one in decisions:
            told.value("tokenmill_desired_workers", one.desired, one.pool)
