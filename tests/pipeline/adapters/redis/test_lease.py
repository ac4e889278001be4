"""The lease on a real Redis: one holds it, and it is lost cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pipeline.adapters.redis.connection import RedisSettings
from pipeline.adapters.redis.lease import RedisLease
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.runtime.availability import ServiceUnavailable
from tests.servers.redis import RedisServer

OpenLease = Callable[[], RedisLease]
LIFETIME = 3.0
"""Long beside the pauses of a busy machine."""


@pytest.fixture
def open_lease(redis_server: RedisServer, unique_name: Callable[[], str]) -> OpenLease:
    settings = RedisSettings(redis_server.url, prefix=unique_name(), timeout_seconds=2.0, connect_timeout_seconds=2.0)
    return lambda: RedisLease(settings, "dispatcher", LIFETIME, SystemClock(), SystemRandomness())


@pytest.mark.slow
def test_one_of_two_holds_the_lease_as_long_as_it_renews(open_lease: OpenLease) -> None:
    one, two = open_lease(), open_lease()
    assert (one.held(), one.renew(), two.renew()) == (False, True, False)
    for _ in range(6):
        time.sleep(LIFETIME / 4)
        assert one.renew()
        assert not two.renew()
    assert one.held()
    assert not two.held()


@pytest.mark.slow
def test_a_silent_holder_loses_the_lease_and_knows_without_a_request(open_lease: OpenLease) -> None:
    one, two = open_lease(), open_lease()
    assert one.renew()
    time.sleep(LIFETIME + 0.1)
    assert not one.held()
    assert two.renew()
    assert not one.renew()


def test_a_released_lease_is_free_at_once(open_lease: OpenLease) -> None:
    one, two = open_lease(), open_lease()
    one.renew()
    one.release()
    assert not one.held()
    assert two.renew()
    one.release()
    assert not one.renew(), "what another holds can't be released"
    assert two.renew()


def test_on_a_server_without_its_data_the_first_to_renew_has_the_lease(
    redis_server: RedisServer, open_lease: OpenLease
) -> None:
    one, two = open_lease(), open_lease()
    one.renew()
    redis_server.start_empty()
    assert two.renew()
    assert not one.renew()
    assert not one.held()


@pytest.mark.slow
def test_without_a_server_the_lease_expires(redis_server: RedisServer, open_lease: OpenLease) -> None:
    one = open_lease()
    assert one.renew()
    redis_server.pause()
    with pytest.raises(ServiceUnavailable, match="renew a lease"):
        one.renew()
    time.sleep(LIFETIME)
    assert not one.held()
    redis_server.resume()
    assert one.renew()
