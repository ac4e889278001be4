"""The price of a worker: from an option, the settings, or the instance's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.prices import Market
from schemas.settings.settings import InstanceOptions, Settings, load_settings
from tests.servers.instance_metadata import MetadataServer
from tokenmill.errors import UserError
from tokenmill.local.pricing import price_of_worker
from tokenmill.services import instance_metadata
from tokenmill.services.instance_metadata import ENDPOINT_VARIABLE


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    server = MetadataServer()
    monkeypatch.setenv(ENDPOINT_VARIABLE, server.endpoint)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has no tokenmill.toml."""
    monkeypatch.chdir(tmp_path)


def settings_with_metadata(**more: Any) -> Settings:
    return load_settings(instance=InstanceOptions(use_ec2_metadata=True), **more)


def test_given_nothing_then_no_price_is_made_up() -> None:
    assert price_of_worker(load_settings()) is None


@pytest.mark.parametrize(("market", "price"), [("spot", 0.268), ("on-demand", 0.8048)])
def test_given_an_instance_then_its_price_is_the_books_shared_by_its_workers(market: Market, price: float) -> None:
    instance = InstanceOptions(type="g6.xlarge", region="us-east-1", market=market, workers=2)
    assert price_of_worker(load_settings(instance=instance)) == pytest.approx(price / 2)
    assert price_of_worker(load_settings(instance=instance, price_per_hour=2.0)) == 2.0
    assert price_of_worker(load_settings(instance=instance, price_per_hour=2.0), 3.0) == 3.0


def test_given_an_instance_that_the_book_lacks_then_it_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no price of x9.huge in any, on-demand; it doesn't have that type"):
        price_of_worker(load_settings(instance=InstanceOptions(type="x9.huge")))


def test_given_an_ec2_instance_when_queried_then_type_region_and_market_are_known(metadata: MetadataServer) -> None:
    assert price_of_worker(settings_with_metadata()) == 0.268
    metadata.metadata["instance-life-cycle"] = "on-demand"
    assert price_of_worker(settings_with_metadata()) == 0.8048


def test_given_a_service_that_never_answers_then_the_call_fails_with_a_message(
    metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_metadata, "TIMEOUT", 0.2)
    metadata.silent.set()
    with pytest.raises(UserError, match=r"find this machine's type .*TOKENMILL_INSTANCE__USE_EC2_METADATA"):
        price_of_worker(settings_with_metadata())
