"""The lane on a real Redis fulfils the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.redis import RedisLane
from tests.pipeline.contracts.lane_contract import LaneContract, MakeLane
from tests.servers.redis import RedisServer


class TestRedisLaneContract(LaneContract):
    @pytest.fixture
    def make_lane(self, redis_server: RedisServer, unique_name: Callable[[], str]) -> MakeLane:
        where = RedisSettings(redis_server.url, prefix=unique_name())
        return lambda settings: RedisLane(where, SystemClock(), settings)
