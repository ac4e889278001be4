"""The estimate of a table's job, as it is printed."""

from __future__ import annotations

from tokenmill.frames.jobs.estimate import TableEstimate


def test_given_a_time_when_printed_then_the_cost_is_that_or_how_to_give_a_price() -> None:
    def cost_line(cost: float | None, price: float | None) -> str:
        estimate = TableEstimate(2, 2, 8, 0, 4, 4, seconds=1800.0, cost=cost, price_per_hour=price)
        return next(line for line in str(estimate).splitlines() if line.startswith("cost "))

    assert cost_line(1.0, 2.0) == "cost             1.0000"
    assert "unknown: this machine has no price per hour; set TOKENMILL_PRICE_PER_HOUR" in cost_line(None, None)
