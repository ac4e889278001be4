"""The questions of the dashboards, as their files for Grafana have them, put to a Prometheus."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from infra.dashboards import FOLDER
from tests.servers.prometheus import PrometheusServer

CHOSEN: Final = {"$__rate_interval": "10s", "$__range": "60s", "$model": ".+", "$instance": ".+"}
"""Grafana's values for its variables."""

OF_RELEASES: Final = {
    "Releases", "Candidates beside the served version", "Rows that candidates computed, too",
    "Workers that failed their canary prompts",
}  # fmt: skip
"""Panels that have data only during a release (`test_releases`)."""

ABSENT: Final = {
    "no model has been released",
    "no release is open",
    "no release with callers is open",
    "no worker has failed one",
    "no model is a mixture of experts",
    "no worker has a second tier (--kv-offloading-size, --kv-cache-dir)",
    "no worker has an NVIDIA GPU",
    "no clock is lowered, or no worker has an NVIDIA GPU",
    "no worker has a role (--role)",
    "no virtual model has been requested",
    "no setting of TOKENMILL_OVERLOAD is on",
    "no experiment with the weights is open",
    "no worker has content policies (--content-policy)",
    "no guard model judges (--content-policy guard:FILE)",
}
"""Reasons of empty panels in the installation of `test_observability`."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a panel. `seldom`: when there may be no answer; None: there always is one."""

    dashboard: str
    panel: str
    text: str
    seldom: str | None

    @property
    def real(self) -> str:
        """As Grafana sends it."""
        text = self.text
        for name, value in CHOSEN.items():
            text = text.replace(name, value)
        assert "$" not in text, text
        return text


def questions() -> list[Question]:
    """All of them, of all dashboards."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            seldom = re.search(r"Empty while (.+)\.$", panel["description"])
            found += [
                Question(path.stem, panel["title"], target["expr"], seldom and seldom[1]) for target in panel["targets"]
            ]
    return found


def variables() -> set[str]:
    """The queries of the dashboards' variables, which must have results."""
    queries = set()
    for path in FOLDER.glob("*.json"):
        for variable in json.loads(path.read_text(encoding="utf-8"))["templating"]["list"]:
            of = re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", ""))
            if of is not None:
                queries.add(f"group by ({of[2]}) ({of[1]})")
    return queries


class PanelAnswers:
    """Which questions have had an answer with a number so far."""

    def __init__(self, prometheus: PrometheusServer, questions: list[Question]) -> None:
        self._prometheus = prometheus
        self.left = questions

    def poll(self) -> list[Question]:
        """Repeat the queries without a result so far; those that still have none."""
        self.left = [one for one in self.left if not self._has_answer(one.real)]
        return self.left

    def _has_answer(self, text: str) -> bool:
        return any(one["value"][1] not in ("NaN", "+Inf", "-Inf") for one in self._prometheus.query(text))
