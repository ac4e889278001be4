"""The price of a worker's hour: the given one, or the price book's for the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from schemas.prices import PriceBookError, read_price_book
from tokenmill.errors import UserError
from tokenmill.services.instance_metadata import ask

if TYPE_CHECKING:
    from schemas.prices import Market, PriceBook
    from schemas.settings.settings import InstanceOptions, Settings
    from tokenmill.local.run_plan import RunPlan

NO_PRICE: Final = (
    "this machine has no price per hour; set TOKENMILL_PRICE_PER_HOUR or TOKENMILL_INSTANCE__TYPE, or give commands "
    "--price-per-hour"
)
"""Why a cost is unknown, and the fix."""


def load_price_book(path: Path | None) -> PriceBook:
    """Read the price book; raises `UserError`."""
    try:
        return read_price_book(path)
    except PriceBookError as error:
        raise UserError(str(error)) from error


def describe_instance(instance: InstanceOptions) -> InstanceOptions:
    """The options, updated from the instance's metadata. Raises `UserError` where that isn't available."""
    try:
        kind, region, life = ask("instance-type", "placement/region", "instance-life-cycle")
    except OSError as error:
        raise UserError(
            f"the instance's metadata service can't be reached to find this machine's type ({error}); unset "
            "TOKENMILL_INSTANCE__USE_EC2_METADATA where it isn't Amazon's, and set TOKENMILL_INSTANCE__TYPE"
        ) from error
    found = {"type": kind, "region": region, "market": "spot" if life == "spot" else "on-demand"}
    return instance.model_copy(update={name: value for name, value in found.items() if value is not None})


def price_of_worker(settings: Settings, given: float | None = None) -> float | None:
    """The price of a worker: the command line's, else the settings', else the book's price of the instance, divided by
    the workers on it; None: unknown. Raises `UserError` where the book has no such price.
    """
    if given is not None:
        return given
    instance = settings.instance
    if settings.price_per_hour is not None:
        return settings.price_per_hour
    if instance.use_ec2_metadata:
        instance = describe_instance(instance)
    if instance.type is None:
        return None
    book = load_price_book(settings.price_book)
    try:
        found = book.require(instance.type, instance.region, instance.market, settings.price_book)
    except PriceBookError as error:
        raise UserError(str(error)) from error
    return found.per_hour / instance.workers


class EstimatePrices:
    """Prices of a worker's hour for an estimate, where known. Raises `UserError` where the price book lacks a required
    price."""

    def __init__(
        self,
        settings: Settings,
        per_hour: float | None,
        instance: str | None,
        region: str | None,
        market: Market | None,
    ) -> None:
        chosen = {"type": instance, "region": region, "market": market}
        update = {name: value for name, value in chosen.items() if value is not None}
        if instance is not None:
            settings = settings.model_copy(update={"price_per_hour": None})
        self._settings = settings.model_copy(update={"instance": settings.instance.model_copy(update=update)})
        self._per_hour = per_hour
        self._named = instance is not None

    def here(self) -> float | None:
        """The price of this machine."""
        return price_of_worker(self._settings, self._per_hour)

    def given(self) -> float | None:
        """The price of another machine, only if an option gives one."""
        return self.here() if self._named else self._per_hour

    def of_replica(self, name: str, devices: int) -> float | None:
        """The price of so many accelerators that share a model: that of an option, else the book's of each."""
        if self._named or self._per_hour is not None:
            return self.given()
        instance = self._settings.instance
        found = load_price_book(self._settings.price_book).find(name, instance.region, instance.market)
        return None if found is None else devices * found.per_hour


def check_limit(plan: RunPlan) -> None:
    """Check that a plan with a spending limit has a price; raises `UserError`."""
    if plan.max_cost is not None and plan.price_per_hour is None:
        raise UserError(f"--max-cost can't be enforced: {NO_PRICE}")
