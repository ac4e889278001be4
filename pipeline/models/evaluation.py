"""The evaluation of a new model version: a pure function of both versions' results for the same shards or requests.

A shard is one sample: its rows were computed together, so they aren't independent of each other. Of callers' requests,
which gateways copy, 16 in the order of their ends are one sample. Samples arrive one after the other and are tested
repeatedly, at 8, 16, 32, … shards (`pipeline.sequential_test`).

At each test a limit is *broken* when the whole interval lies beyond it, *kept* when the whole interval lies within, and
open otherwise. One broken limit ends the release; a version that keeps all limits is promoted. A version with an open
limit at the last test is rolled back: a new version has to be shown to be good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

from pipeline.sequential_test import interim_tests, mean_bounds
from schemas.releases import Bounds, LogprobDrift, ReleaseComparison
from schemas.settings.releases import ReleaseRules

LIMITS: Final = 4
"""Number of limits that are tested on samples: errors, agreement, and of requests TTFT and ITL, of shards latency."""

Standing = Literal["kept", "broken", "open"]


@dataclass(frozen=True, slots=True)
class ShadowedShard:
    """The comparison of two versions on the rows of one shard.

    Attributes:
        rows: rows that both computed.
        failed: rows that only the candidate failed.  mended: rows that only the stable version failed.
        agreement: mean similarity of the answers, 0 to 1; None: there is no row that both answered.
        latency: logarithm of the ratio of the candidate's time per token to the stable version's; None: not measured.
        ttft, itl, length: likewise, of the time to the first token, the time between tokens, and the answer's tokens.
    """

    rows: int
    failed: int
    mended: int
    agreement: float | None
    latency: float | None
    ttft: float | None = None
    itl: float | None = None
    length: float | None = None


@dataclass(frozen=True, slots=True)
class ReleaseVerdict:
    """The verdict of a comparison."""

    promote: bool
    reasons: tuple[str, ...]
    comparison: ReleaseComparison


def judge(
    shards: Sequence[ShadowedShard], rules: ReleaseRules, drift: LogprobDrift | None, sequences: int = 1
) -> ReleaseVerdict | None:
    """The verdict, as soon as there is one; None: more shards are needed.

    Args:
        shards: in order of their arrival.
        sequences: number of such sequences by which the release is judged; they share the error probability.
    """
    for count, share in interim_tests(rules.least_shards, rules.most_shards):
        if count > len(shards):
            return None
        # The error probability of a bound at this interim test.
        compared = compare(shards[:count], drift, (1 - rules.confidence) * share / (LIMITS * sequences))
        standings = _standings(compared, rules)
        broken = [why for standing, why in standings if standing == "broken"]
        if broken:
            return ReleaseVerdict(False, tuple(broken), compared)
        if all(standing == "kept" for standing, _ in standings):
            return ReleaseVerdict(True, tuple(why for _, why in standings), compared)
    left = [why for standing, why in standings if standing == "open"]
    return ReleaseVerdict(False, ("not shown to be as good", *left), compared)


def compare_so_far(
    shards: Sequence[ShadowedShard], rules: ReleaseRules, drift: LogprobDrift | None
) -> ReleaseComparison:
    """The comparison of all shards so far, for display; it decides nothing."""
    return compare(shards, drift, 1 - rules.confidence)


def compare(shards: Sequence[ShadowedShard], drift: LogprobDrift | None, error: float) -> ReleaseComparison:
    """Compare both versions. The true value lies beyond each bound, on either side, with probability `error`."""
    rows = sum(shard.rows for shard in shards)
    failed, mended = sum(shard.failed for shard in shards), sum(shard.mended for shard in shards)
    agreement = mean_bounds([shard.agreement for shard in shards if shard.agreement is not None], error)
    return ReleaseComparison(
        shards=len(shards), rows=rows, failed=failed, mended=mended, agreement=agreement, drift=drift,
        more_errors=_more_errors(rows, failed, mended, error),
        latency=_ratio([shard.latency for shard in shards], error),
        ttft=_ratio([shard.ttft for shard in shards], error),
        itl=_ratio([shard.itl for shard in shards], error),
        length=_ratio([shard.length for shard in shards], error),
    )  # fmt: skip


def _standings(compared: ReleaseComparison, rules: ReleaseRules) -> list[tuple[Standing, str]]:
    """The state of each limit, and its description."""
    found = []
    if compared.drift is not None and rules.drift is not None:
        standing: Standing = "kept" if compared.drift.mean <= rules.drift else "broken"
        found.append((standing, f"log-probabilities differ by {compared.drift.mean:.3g}, the limit is {rules.drift:g}"))
    errors = compared.more_errors
    found.append((
        _standing(errors, most=rules.more_errors),
        f"share of rows that fail more: {_words(errors)}, the limit is {rules.more_errors:g}",
    ))  # fmt: skip
    agreement = compared.agreement
    least = None if agreement is None else Bounds(mean=-agreement.mean, low=-agreement.high, high=-agreement.low)
    found.append((
        _standing(least, most=-rules.agreement),
        f"agreement of answers: {_words(agreement)}, the limit is {rules.agreement:g}",
    ))  # fmt: skip
    for what, ratio, limit in (
        ("time of a token", compared.latency, rules.slower),
        ("time to the first token", compared.ttft, rules.slower_ttft),
        ("time between tokens", compared.itl, rules.slower_itl),
    ):
        if ratio is not None:
            words = f"{what}: {_words(ratio)} times as long, the limit is {limit:g}"
            found.append((_standing(ratio, most=limit), words))
    return found


def _standing(bounds: Bounds | None, *, most: float) -> Standing:
    if bounds is None:
        return "open"
    return "kept" if bounds.high <= most else "broken" if bounds.low > most else "open"


def _words(bounds: Bounds | None) -> str:
    return "not known" if bounds is None else f"{bounds.mean:.3g} ({bounds.low:.3g} to {bounds.high:.3g})"


def _ratio(logarithms: Sequence[float | None], error: float) -> Bounds | None:
    """The geometric mean of ratios, of which these are the known logarithms."""
    found = mean_bounds([value for value in logarithms if value is not None], error)
    if found is None:
        return None
    return Bounds(**{name: math.exp(min(value, 50.0)) for name, value in found.model_dump().items()})


def _more_errors(rows: int, failed: int, mended: int, error: float) -> Bounds | None:
    """The candidate's failure share minus the stable version's, among rows that only one failed, with Wilson's bounds
    for either share. Rows that both failed don't count."""
    if not rows:
        return None
    z = NormalDist().inv_cdf(1 - error)
    (fail_low, fail_high), (mend_low, mend_high) = _wilson(failed, rows, z), _wilson(mended, rows, z)
    return Bounds(mean=(failed - mended) / rows, low=fail_low - mend_high, high=fail_high - mend_low)


def _wilson(count: int, of: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927)."""
    share, square = count / of, z * z / of
    middle = (share + square / 2) / (1 + square)
    reach = z / (1 + square) * math.sqrt(share * (1 - share) / of + square / (4 * of))
    return max(0.0, middle - reach), min(1.0, middle + reach)
