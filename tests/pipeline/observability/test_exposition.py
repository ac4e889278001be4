"""Metrics of sources become text that Prometheus reads, whatever the values are."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline import metric_collectors
from pipeline.observability.exposition import Metrics
from pipeline.observability.histogram import Histogram
from pipeline.observability.metric_definitions import METRICS
from pipeline.observability.samples import Samples
from pipeline.runtime.availability import ServiceUnavailable
from schemas.workers.metrics import LATENCY_BOUNDS
from tests.pipeline.observability.scrapes import OPENMETRICS, Scrape, parsed

PROMTOOL = shutil.which("promtool")


def everything(samples: Samples) -> None:
    """A value for each name."""
    for number, metric in enumerate(METRICS):
        value = Histogram((0, 2, 1), 0.5) if metric.kind == "histogram" else number + 0.5
        samples.value(metric.name, value, *(f"{label}-{number}" for label in metric.labels))


def report(*samples: object) -> str:
    return Metrics(samples).encode("")[0].decode()  # type: ignore[arg-type]


def test_names_and_units_are_as_prometheus_wants_them() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"tokenmill_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert not re.search(r"_(ms|milliseconds|minutes|percent|count|sum|bucket)(_|$)", metric.name), metric
        assert metric.kind != "histogram" or metric.name.endswith("_seconds"), metric
        assert metric.help.endswith("."), metric
        assert not set(metric.labels) & {"job", "instance", "le", "worker", "id", "user", "key"}, metric
        assert "tenant" not in metric.labels or metric.name == "tokenmill_answer_latency_total", "it bounds them"
        assert set(metric.by) <= {"worker", "dispatcher", "gateway", "intake", "autoscale"}
        assert metric.by
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_name_comes_through_the_parser_with_its_kind_labels_and_help(openmetrics: bool) -> None:
    text, kind = Metrics([everything]).encode(OPENMETRICS if openmetrics else "*/*")
    assert ("openmetrics" in kind) is openmetrics
    found = parsed(text.decode(), openmetrics=openmetrics)
    ours = {family.name: family for family in found.families if family.name.startswith("tokenmill_")}
    assert found.names >= {metric.name for metric in METRICS}
    for number, metric in enumerate(METRICS):
        family = ours[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        labels = {label: f"{label}-{number}" for label in metric.labels}
        if metric.kind == "histogram":
            assert found.sum(f"{metric.name}_count", **labels) == 3
            assert found.sum(f"{metric.name}_sum", **labels) == 0.5
            ends = found.all(f"{metric.name}_bucket", **labels)
            assert ends[f"{LATENCY_BOUNDS[0]}",] == 0
            assert ends[f"{LATENCY_BOUNDS[1]}",] == 2
            assert {float(end) for (end,) in ends} == {*LATENCY_BOUNDS, float("inf")}
        else:
            assert found.sum(metric.name, **labels) == number + 0.5


def test_process_metrics_are_reported() -> None:
    found = parsed(report())
    assert found.sum("process_resident_memory_bytes") > 1_000_000
    assert found.sum("process_cpu_seconds_total") > 0
    assert found.sum("process_open_fds") > 0


def test_names_of_models_can_be_anything() -> None:
    hostile = 'a"b\\c\nd{x="y"} 文 \x00'

    def collect(samples: Samples) -> None:
        samples.value("tokenmill_workers", 3, hostile)

    for accept in ("", OPENMETRICS):
        text = Metrics([collect]).encode(accept)[0].decode()
        found: Scrape = parsed(text, openmetrics=bool(accept))
        assert found.all("tokenmill_workers") == {(hostile,): 3}


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/html", ";;;=,,q=", "application/openmetrics-text; version=9", "\xff"]
)
def test_any_accept_header_gets_a_readable_response(accept: str) -> None:
    text, kind = Metrics([everything]).encode(accept)
    assert parsed(text.decode(), openmetrics="openmetrics" in kind).names >= {"tokenmill_jobs"}


def test_an_unavailable_source_is_left_out_and_the_others_are_reported() -> None:
    def unavailable(samples: Samples) -> None:
        raise ServiceUnavailable("no answer")

    found = parsed(report(unavailable, everything))
    assert "tokenmill_workers" in found.names
    assert found.sum("tokenmill_build_info") > 0


def test_programming_errors_are_raised() -> None:
    samples = Samples()
    with pytest.raises(KeyError):
        samples.value("tokenmill_unheard_of", 1)
    with pytest.raises(ValueError, match="has the labels"):
        samples.value("tokenmill_jobs", 1, "bulk")
    samples.value("tokenmill_kv_blocks", 1, "m")
    with pytest.raises(ValueError, match="has the labels"):
        samples.value("tokenmill_kv_blocks", 1, "m", worker="w")


def test_the_version_is_reported() -> None:
    ((version,),) = parsed(report(metric_collectors.build)).all("tokenmill_build_info")
    assert version


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: its own check of the names is skipped")
@pytest.mark.slow
def test_promtool_finds_no_problem(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    text = "".join(line for line in report(everything).splitlines(keepends=True) if "process_" not in line)
    said = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
