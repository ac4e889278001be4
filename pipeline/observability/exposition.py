"""Encodes the samples of all sources for Prometheus scrapers. Stateless: each scrape calls the sources again."""

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

from pipeline.observability.histogram import Histogram
from pipeline.observability.metric_definitions import METRICS, Metric
from pipeline.observability.samples import Samples, Source
from pipeline.ports import PipelineError

logger = structlog.get_logger(__name__)


class Metrics(Collector):
    """The metrics of one process: those of its sources, and those of the operating system about the process."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = tuple(sources)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Family]:
        """The sources' samples now, in the order of `METRICS`."""
        samples = Samples()
        for source in self._sources:
            try:
                source(samples)
            except PipelineError as error:
                logger.warning("metrics of a source are unavailable", reason=str(error))
        return (_family(metric, samples) for metric in METRICS if metric.name in samples.values)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """The response for a scraper's `Accept` header, and its content type: OpenMetrics where the header asks for it,
        else Prometheus's text format."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _family(metric: Metric, samples: Samples) -> Family:
    labels, values = samples.labels[metric.name], samples.values[metric.name]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for given, counted in values.items():
            assert isinstance(counted, Histogram)
            histogram.add_metric(given, _buckets(counted), counted.seconds)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for given, value in values.items():
        assert not isinstance(value, Histogram)
        family.add_metric(given, value)
    return family


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Each bucket's upper bound with the number of samples at or below it."""
    ends = [*(str(float(bound)) for bound in counted.bounds), "+Inf"]
    counts = [*counted.counts, *[0] * (len(ends) - len(counted.counts))]
    return list(zip(ends, accumulate(counts), strict=True))
