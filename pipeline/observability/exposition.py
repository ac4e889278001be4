"""From what sources tell to what a scraper reads. Nothing is kept here: each scrape asks the sources anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pipeline.observability.metric_definitions import METRICS, Metric
from pipeline.observability.samples import Samples, Source, Times
from pipeline.ports import PipelineError

logger = structlog.get_logger(__name__)


class Metrics(Collector):
    """What one process tells: what its sources tell, and what the system knows of the process."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Family]:
        """What the sources tell now, in the table's order."""
        told = Samples()
        for source in self._sources:
            try:
                source(told)
            except PipelineError as error:
                logger.warning("figures are not known", reason=str(error))
        return (_family(metric, told) for metric in METRICS if metric.name in told.values)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """What a scraper gets that accepts this (an `Accept` header), and its content type: OpenMetrics where it is
        asked for, else Prometheus's text."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _family(metric: Metric, told: Samples) -> Family:
    labels, values = told.labels[metric.name], told.values[metric.name]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for given, times in values.items():
            assert isinstance(times, Times)
            histogram.add_metric(given, _buckets(times), times.seconds)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for given, value in values.items():
        assert not isinstance(value, Times)
        family.add_metric(given, value)
    return family


def _buckets(times: Times) -> list[tuple[str, float]]:
    """Each bucket's upper end with how many samples lie at or below it."""
    ends = [*(str(float(bound)) for bound in times.bounds), "+Inf"]
    counts = [*times.counts, *[0] * (len(ends) - len(times.counts))]
    return list(zip(ends, accumulate(counts), strict=True))
