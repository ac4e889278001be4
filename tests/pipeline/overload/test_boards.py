"""Both boards: steps are active while a gateway reports them, and end by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pipeline.adapters.memory.degradation import MemoryDegradationBoard
from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.degradation import RedisDegradationBoard
from pipeline.adapters.system_clock import SystemClock
from pipeline.overload.observer import DegradationObserver
from pipeline.overload.ports import WORKER_STEPS, DegradationBoard
from pipeline.runtime.availability import ServiceUnavailable
from tests.servers.redis import RedisServer
from tests.waiting import wait_for


@pytest.fixture(params=["memory", "redis"])
def board(request: pytest.FixtureRequest, unique_name: Callable[[], str]) -> Iterator[DegradationBoard]:
    if request.param == "memory":
        yield MemoryDegradationBoard(SystemClock())
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    made = RedisDegradationBoard(RedisSettings(server.url, prefix=unique_name()))
    yield made
    made.close()


def test_reported_steps_are_active_for_their_model_only(board: DegradationBoard) -> None:
    assert board.active("m", WORKER_STEPS) == frozenset()
    board.report("m", ["pause_bulk"], 60.0)
    assert board.active("m", WORKER_STEPS) == {"pause_bulk"}
    assert board.active("m", ["drafts_off"]) == frozenset()
    assert board.active("other", WORKER_STEPS) == frozenset()
    board.report("m", ["drafts_off"], 60.0)
    assert board.active("m", WORKER_STEPS) == set(WORKER_STEPS)
    board.report("m", [], 60.0)
    assert board.active("m", []) == frozenset()


def test_a_step_that_is_not_reported_again_ends(board: DegradationBoard) -> None:
    board.report("m", ["pause_bulk"], 0.05)
    wait_for(lambda: not board.active("m", WORKER_STEPS), "the step is still active")


def test_a_worker_follows_the_board_and_a_board_that_is_away_leaves_nothing_paused(board: DegradationBoard) -> None:
    class Away:
        is_away = False

        def active(self, model: str, among: object) -> frozenset[str]:
            if self.is_away:
                raise ServiceUnavailable("redis://host: can't")
            return board.active(model, WORKER_STEPS)

        def report(self, model: str, steps: object, lifetime_seconds: float) -> None:
            raise NotImplementedError

    away = Away()
    observer = DegradationObserver(away, "m")  # type: ignore[arg-type]
    board.report("m", ["pause_bulk"], 60.0)
    with observer.polling():
        wait_for(lambda: observer.steps() == {"pause_bulk"}, "the step is not known")
    away.is_away = True
    observer.refresh()
    assert observer.steps() == frozenset()
