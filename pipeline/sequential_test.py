"""Interim tests of samples that arrive one after the other. Each may be wrong by chance; all of them share one error
probability.

There are few interim tests (at 8, 16, 32, … samples; n doubles), and test k gets the share 2^-(k+1) of the error: a
union bound, which needs no assumption about the dependence of tests. A test uses the first n samples and no others, so
repeating it gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from schemas.releases import Bounds


def interim_tests(least: int, most: int) -> Iterator[tuple[int, float]]:
    """The samples of each interim test, and its share of the error probability. `least`, `most`: samples of the first
    test, and of the last."""
    count, share, most = least, 0.5, max(most, least)
    while count < most:
        yield count, share
        count, share = min(2 * count, most), share / 2
    yield most, share


def mean_bounds(values: Sequence[float], error: float) -> Bounds | None:
    """The mean of independent values, with Student's bounds; None: there are fewer than two. The true mean lies beyond
    each bound, on either side, with probability `error`."""
    if len(values) < 2:
        return None
    mean, spread = fmean(values), stdev(values) / math.sqrt(len(values))
    reach = student_quantile(error, len(values) - 1) * spread
    return Bounds(mean=mean, low=mean - reach, high=mean + reach)


def difference_bounds(values: Sequence[float], control: Sequence[float], error: float) -> Bounds | None:
    """The mean of `values` less that of `control`, where both are independent and their variances differ (Welch 1947);
    None: one of them has fewer than two. `error`: as in `mean_bounds`."""
    if min(len(values), len(control)) < 2:
        return None
    mean = fmean(values) - fmean(control)
    parts = [stdev(each) ** 2 / len(each) for each in (values, control)]
    spread, degrees = sum(parts), [len(values) - 1, len(control) - 1]
    if not spread:
        return Bounds(mean=mean, low=mean, high=mean)
    # Welch and Satterthwaite's degrees of freedom, which lie between the smaller sample's and the sum of both.
    freedom = int(spread**2 / sum(part**2 / each for part, each in zip(parts, degrees, strict=True)))
    reach = student_quantile(error, max(min(degrees), freedom)) * math.sqrt(spread)
    return Bounds(mean=mean, low=mean - reach, high=mean + reach)


def student_quantile(error: float, degrees: int) -> float:
    """The value that Student's distribution exceeds with probability `error`, below one half."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, degrees) > error else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_tail(angle: float, degrees: int) -> float:
    """The probability of values above sqrt(degrees) * tan(angle) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    square, is_odd = math.cos(angle) ** 2, degrees % 2
    term = total = 0.0 if degrees == 1 else math.cos(angle) if is_odd else 1.0
    for factor in range(2 + is_odd, degrees - 1, 2):
        term *= square * (factor - 1) / factor
        total += term
    inner = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inner) if is_odd else inner)) / 2
