"""The settings of the lane's limits reach the lane of every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.lane.ports import LaneFull, OpenLane
from schemas.settings.lane import LaneOptions, LaneSettings
from schemas.settings.settings import Settings
from schemas.workers.lane import LaneRequest
from tests.servers.redis import RedisServer
from tokenmill.root import open_root
from tokenmill.services.backends import in_process_backends, redis_backends

LIMITS = LaneOptions(limits=LaneSettings(max_waiting=2, max_tenant_share=0.5))


def _fills_at_two(lane: OpenLane) -> None:
    """Two requests may wait, one of each tenant."""
    lane.send(LaneRequest("one", "m", {}, tenant="a"))
    with pytest.raises(LaneFull, match="1 requests of this tenant"):
        lane.send(LaneRequest("two", "m", {}, tenant="a"))
    lane.send(LaneRequest("three", "m", {}, tenant="b"))
    with pytest.raises(LaneFull, match="2 requests wait"):
        lane.send(LaneRequest("four", "m", {}, tenant="c"))


def test_on_redis(redis_server: RedisServer) -> None:
    settings = Settings.model_validate({"redis_url": redis_server.url, "lane": LIMITS})
    with redis_backends(settings) as backends:
        _fills_at_two(backends.lane)


def test_in_one_process(tmp_path: Path) -> None:
    settings = Settings(lane=LIMITS)
    with open_root(str(tmp_path), settings) as root:
        _fills_at_two(in_process_backends(root, settings).lane)
