"""Scrapes of metrics, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx2
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_prometheus

from tests.waiting import HANG_SECONDS

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@dataclass(frozen=True)
class Scrape:
    """The metrics of a scrape: samples by name, and the families."""

    families: list[Any]

    def all(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Values of the samples of this name with at least these labels, by the others' values."""
        found: dict[tuple[str, ...], float] = {}
        for family in self.families:
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    others = tuple(value for key, value in sorted(sample.labels.items()) if key not in labels)
                    assert others not in found, f"{name}{sample.labels} is reported twice"
                    found[others] = sample.value
        return found

    def sum(self, name: str, **labels: str) -> float:
        """Of the samples of this name with at least these labels; there must be some."""
        found = self.all(name, **labels)
        assert found, f"{name}{labels} is not reported"
        return sum(found.values())

    @property
    def names(self) -> set[str]:
        """Of the families that have samples, as the table has them."""
        return {
            family.name + "_total" * (family.type == "counter" and not family.name.endswith("_total"))
            for family in self.families
            if family.samples
        }


def scrape(url: str, key: str | None = None, *, openmetrics: bool = False) -> Scrape:
    """The metrics at this address."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx2.get(url, headers=headers | ({"Accept": OPENMETRICS} if openmetrics else {}), timeout=HANG_SECONDS)
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"]
    assert kind.startswith("application/openmetrics-text" if openmetrics else "text/plain"), kind
    return parsed(answer.text, openmetrics=openmetrics)


def parsed(text: str, *, openmetrics: bool = False) -> Scrape:
    """The metrics in a text."""
    families = list((read_openmetrics if openmetrics else read_prometheus)(text))
    check_histograms(families)
    return Scrape(families)


def check_histograms(families: Iterable[Any]) -> None:
    """Buckets only grow, the last one is all, and is the count."""
    for family in families:
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        counts: dict[tuple[tuple[str, str], ...], float] = {}
        for sample in family.samples:
            key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                counts[key] = sample.value
        assert series.keys() == counts.keys(), family.name
        for key, buckets in series.items():
            assert buckets == sorted(buckets), (family.name, key)
            assert [count for _, count in buckets] == sorted(count for _, count in buckets), (family.name, key)
            assert buckets[-1] == (float("inf"), counts[key]), (family.name, key)
