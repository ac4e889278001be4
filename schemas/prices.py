"""The price book: prices of machines by the hour, in a file that operators edit.

    currency = "USD"

    [[price]]
    instance_type = "g6.xlarge"
    region = "us-east-1"
    market = "on-demand"
    per_hour = 0.8048
    as_of = 2026-11-22
    source = "Amazon's price list"

An instance type is anything with a price of its own: a cloud's machine, or an accelerator by its name.
"""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Market = Literal["on-demand", "spot"]
ANY_REGION: Final = "any"
"""The region of prices that apply wherever a region has none of its own."""

SHIPPED: Final = Path(__file__).with_name("prices.toml")
"""The book that comes with tokenmill."""

Words = Annotated[str, Field(min_length=1, max_length=500)]


class PriceBookError(ValueError):
    """Raised when a price book can't be used, or lacks a price; the message names the file and what to do."""


class Price(BaseModel):
    """One entry.

    Attributes:
        per_hour: of the whole machine, in the book's currency.
        as_of, source: when and where the price was read, since prices change.
        device, devices: its accelerators, by the names of `estimate --hardware`; None: no known one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_type: Words
    region: Words = ANY_REGION
    market: Market
    per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    as_of: date
    source: Words
    device: Words | None = None
    devices: Annotated[int, Field(ge=1)] = 1

    @property
    def name(self) -> str:
        """The entry's name in messages."""
        return f"{self.instance_type} in {self.region}, {self.market}"


class PriceBook(BaseModel):
    """All entries; one for each instance type, region and market."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    price: tuple[Price, ...] = ()

    @model_validator(mode="after")
    def _each_once(self) -> PriceBook:
        names = [one.name for one in self.price]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} has two prices; leave one")
        return self

    def find(self, instance_type: str, region: str, market: Market) -> Price | None:
        """The price there, else the one of any region."""
        found = {one.region: one for one in self.price if (one.instance_type, one.market) == (instance_type, market)}
        return found.get(region) or found.get(ANY_REGION)

    def require(self, instance_type: str, region: str, market: Market, where: Path | None = None) -> Price:
        """The price as `find` returns it; raises `PriceBookError` with the known entries if there is none."""
        found = self.find(instance_type, region, market)
        if found is None:
            known = sorted({one.name for one in self.price if one.instance_type == instance_type})
            there = f"it has {'; '.join(known)}" if known else "it doesn't have that type"
            raise PriceBookError(
                f"{where or SHIPPED}: no price of {instance_type} in {region}, {market}; {there}; add an entry"
            )
        return found


def read_price_book(path: Path | None = None) -> PriceBook:
    """The book in this file (None: the shipped one); raises `PriceBookError`."""
    path = path or SHIPPED
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PriceBookError(f"{path}: there is no price book; correct TOKENMILL_PRICE_BOOK or unset it") from error
    except (OSError, ValueError) as error:
        raise PriceBookError(f"{path}: can't be read as TOML: {error}") from error
    try:
        return PriceBook.model_validate(raw)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise PriceBookError(f"{path}: {_place(raw, detail['loc'])}: {detail['msg']}") from error


def _place(raw: dict[str, object], steps: tuple[int | str, ...]) -> str:
    """The location of an error in the book, for its user: the entry's number and its instance type."""
    words = [str(step) for step in steps if not isinstance(step, int)]
    number = next((step for step in steps if isinstance(step, int)), None)
    if number is None:
        return ".".join(words) or "the whole"
    entries = raw.get("price")
    entry = entries[number] if isinstance(entries, list) else None
    whose = entry.get("instance_type") if isinstance(entry, dict) else None
    return f"[[price]] number {number + 1}" + (f" ({whose})" if whose else "") + f", {'.'.join(words[1:]) or 'all'}"
