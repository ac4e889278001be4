"""The adapters in memory fulfil the contracts of their deployed counterparts: queue, heartbeats, lane."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock
from pipeline.lane.memory import MemoryLane
from schemas.settings.lane import LaneSettings
from tests.pipeline.contracts.heartbeats_contract import LIFETIME, HeartbeatsContract, MakeHeartbeats
from tests.pipeline.contracts.lane_contract import LaneContract, MakeLane
from tests.pipeline.contracts.queue_contract import MakeQueue, QueueContract
from tests.pipeline.simulation import SimulatedClock


class TestMemoryQueueContract(QueueContract):
    @pytest.fixture
    def make_queue(self) -> MakeQueue:
        one = MemoryQueue()
        return lambda: one


class TestMemoryHeartbeatsContract(HeartbeatsContract):
    @pytest.fixture
    def clock(self) -> SimulatedClock:
        return SimulatedClock()

    @pytest.fixture
    def make_heartbeats(self, clock: SimulatedClock) -> MakeHeartbeats:
        one = MemoryHeartbeats(clock, LIFETIME)
        return lambda _: one

    @pytest.fixture
    def pass_time(self, clock: SimulatedClock) -> Callable[[float], None]:
        return clock.sleep


class TestMemoryLaneContract(LaneContract):
    @pytest.fixture
    def make_lane(self) -> MakeLane:
        opened: list[MemoryLane] = []

        def make(settings: LaneSettings) -> MemoryLane:
            opened.append(opened[0] if opened else MemoryLane(SystemClock(), settings))
            return opened[-1]

        return make
