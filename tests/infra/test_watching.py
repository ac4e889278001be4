"""Checks of dashboards and alerts: their metrics exist, their files are up to date, and each alert has a runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from infra import dashboards, promql
from infra.dashboards import read as read_dashboards
from pipeline.observability.metric_definitions import METRICS
from tokenmill.cli import app

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "infra/prometheus"
RUNBOOKS = ROOT / "docs/runbooks"
ALERTS: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
NAMES = [alert["alert"] for alert in ALERTS]
PROMTOOL = shutil.which("promtool")


def test_given_the_dashboard_definitions_then_the_files_are_up_to_date() -> None:
    made = {f"{one.name}.json": dashboards.text(one) for one in read_dashboards()}
    files = {path.name: path.read_text(encoding="utf-8") for path in dashboards.FOLDER.glob("*")}
    assert files == made, "run: python -m infra.dashboards"
    assert set(made) == {"fleet.json", "jobs.json", "worker.json", "interactive.json", "cost.json"}


def test_given_a_dashboard_then_its_panels_lie_side_by_side_and_each_has_its_source() -> None:
    for one in read_dashboards():
        document = json.loads(dashboards.text(one))
        cells: set[tuple[int, int]] = set()
        for panel in document["panels"]:
            position = panel["gridPos"]
            assert position["x"] + position["w"] <= 24
            covered = {
                (x, y)
                for x in range(position["x"], position["x"] + position["w"])
                for y in range(position["y"], position["y"] + position["h"])
            }
            assert not cells & covered, (one.name, panel["title"])
            cells |= covered
            assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]
        assert len({panel["title"] for panel in document["panels"]}) == len(document["panels"])


def test_given_all_metrics_then_a_dashboard_shows_each() -> None:
    shown: set[str] = set()
    for one in read_dashboards():
        shown |= {name for panel in one.panel for query, _ in panel.asks for name in promql.names(query)}
    left_out = {metric.name for metric in METRICS} - shown
    assert left_out == {
        "tokenmill_requests_total", "tokenmill_request_seconds", "tokenmill_slo_weight", "tokenmill_slo_term",
        "tokenmill_slo_batch_tokens", "tokenmill_build_info",
    }  # fmt: skip


@pytest.mark.parametrize(
    "query",
    [
        "rate(tokenmill_no_such_name_total[5m])", "tokenmill_step_seconds", "tokenmill_workers_bucket",
        'tokenmill_workers{tier="bulk"}', "sum by (status) (tokenmill_workers)",
        "sum(tokenmill_jobs) / on (model) sum(tokenmill_jobs)", 'tokenmill_jobs{tier="bulk",state=~"x"}',
    ],
)  # fmt: skip
def test_given_a_query_for_an_unknown_metric_or_label_then_it_is_refused(query: str) -> None:
    with pytest.raises(promql.DriftError):
        promql.check(query)


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_given_an_alert_then_its_metrics_exist_and_it_has_a_runbook(alert: dict[str, Any]) -> None:
    promql.check(alert["expr"])
    assert set(alert["labels"]) == {"severity"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page = ROOT / alert["annotations"]["runbook_url"]
    assert page == RUNBOOKS / f"{alert['alert']}.md"
    text = page.read_text(encoding="utf-8")
    headings = ["What it means", "What users see", "How to check", "How to mend"]
    assert re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE) == [
        alert["alert"],
        *headings,
    ]
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / link).exists(), link


def test_given_the_runbooks_then_each_belongs_to_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == set(NAMES)


def test_given_commands_in_a_runbook_then_they_exist_with_their_options() -> None:
    commands = typer.main.get_command(app)
    found = 0
    for page in RUNBOOKS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"^tokenmill (.+?)(?:\s+#.*)?$", text, re.MULTILINE):
            command: Any = commands
            words = line.split()
            while words and hasattr(command, "commands") and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            assert not hasattr(command, "commands"), (page.name, line)
            options = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, (page.name, line)
            found += 1
    assert found > 10


def test_given_the_targets_of_prometheus_then_they_are_services_of_compose() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    for name in ("gateway", "dispatcher", "intake", "worker"):
        assert jobs[f"tokenmill-{name}"] == {"names": [name], "type": "A", "port": 9100}
        assert services[name]["environment"]["TOKENMILL_METRICS__PORT"] == "9100"
        assert services[name]["environment"]["TOKENMILL_METRICS__HOST"] == "0.0.0.0"
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observability"], "it starts only when its profile is requested"
        for volume in services[name]["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / volume.partition(":")[0]).exists(), volume
    source = yaml.safe_load((ROOT / "infra/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provided = yaml.safe_load((ROOT / "infra/grafana/provisioning/dashboards/tokenmill.yml").read_text())
    mounted = [volume for volume in services["grafana"]["volumes"] if "grafana/dashboards" in volume]
    assert mounted == [f"./infra/grafana/dashboards:{provided['providers'][0]['options']['path']}:ro"]


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason="NOT TESTED HERE: promtool is not installed")
def test_given_promtool_then_rules_and_settings_are_valid_and_each_alert_fires_and_resolves() -> None:
    assert PROMTOOL is not None
    for what in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        ended = subprocess.run([PROMTOOL, *what], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_given_the_synthetic_series_then_each_alert_is_tested_both_silent_and_firing() -> None:
    seen: dict[str, set[bool]] = {name: set() for name in NAMES}
    for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]:
        for checked in case["promql_expr_test"]:
            name = re.search(r'alertname="(\w+)"', checked["expr"])
            assert name is not None
            seen[name[1]].add(checked["exp_samples"][0]["value"] > 0)
    assert [name for name in NAMES if seen[name] != {True, False}] == []
