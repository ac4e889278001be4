"""The price book: valid entries, and messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.planner import HARDWARE
from schemas.prices import PriceBookError, read_price_book

ENTRY = """
[[price]]
instance_type = "{type}"
region = "{region}"
market = "{market}"
per_hour = {price}
as_of = 2026-11-22
source = "a bill"
"""


def entry(type_: str = "g6.xlarge", region: str = "any", market: str = "on-demand", price: object = 1.5) -> str:
    return ENTRY.format(type=type_, region=region, market=market, price=price)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "prices.toml"


def test_given_the_shipped_book_then_each_device_of_the_estimates_has_a_price_and_machines_name_known_ones() -> None:
    shipped = read_price_book()
    assert all(shipped.find(name, "us-east-1", "on-demand") for name in HARDWARE)
    assert {one.device for one in shipped.price} <= {None, *HARDWARE}
    spot, demand = (shipped.require("g6.xlarge", "us-east-1", market) for market in ("spot", "on-demand"))
    assert spot.per_hour < demand.per_hour == 0.8048


def test_given_prices_of_a_region_and_of_any_then_the_nearer_one_counts(book: Path) -> None:
    book.write_text(entry(price=1) + entry(region="eu-west-1", price=2) + entry(market="spot", price=0.3))
    prices = read_price_book(book)
    assert prices.require("g6.xlarge", "eu-west-1", "on-demand").per_hour == 2
    assert prices.require("g6.xlarge", "us-east-1", "on-demand").per_hour == 1
    assert prices.require("g6.xlarge", "eu-west-1", "spot").per_hour == 0.3
    with pytest.raises(PriceBookError, match=r"prices.toml: no price of p5.48xlarge in any, spot; it doesn't have"):
        prices.require("p5.48xlarge", "any", "spot", book)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("price = 3", "price: Input should be"),
        ("[[price", "can't be read as TOML"),
        (entry() + entry(price=-1), r"\[\[price\]\] number 2 \(g6.xlarge\), per_hour: .* greater than or equal to 0"),
        (entry(market="reserved"), r"number 1 \(g6.xlarge\), market: .*'on-demand' or 'spot'"),
        (entry() + 'colour = "red"', r"number 1 \(g6.xlarge\), colour: Extra inputs"),
        (entry().replace("as_of = 2026-11-22", ""), "as_of: Field required"),
        (entry() + entry(), "g6.xlarge in any, on-demand has two prices"),
        ('currency = "dollars"', "currency: String should match"),
    ],
)
def test_given_a_mistake_then_the_message_names_file_entry_and_field(book: Path, text: str, said: str) -> None:
    book.write_text(text)
    with pytest.raises(PriceBookError, match=said) as caught:
        read_price_book(book)
    assert str(caught.value).startswith(f"{book}: ")


def test_given_no_file_then_the_setting_is_named(book: Path) -> None:
    with pytest.raises(PriceBookError, match="TOKENMILL_PRICE_BOOK"):
        read_price_book(book)
