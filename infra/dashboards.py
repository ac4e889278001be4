"""Generates Grafana's dashboards, infra/grafana/dashboards/*.json, from infra/grafana/dashboards.toml.

    python -m infra.dashboards

Each query is checked against the metric definitions (`infra.promql`), so none can use a metric that no process emits.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.promql import check

FOLDER: Final = Path(__file__).parent / "grafana/dashboards"
SOURCE: Final = FOLDER.with_suffix(".toml")
_PROMETHEUS: Final = {"type": "prometheus", "uid": "${source}"}
_COLUMNS: Final = 24
_STAT_HEIGHT: Final = 4
_HEIGHT: Final = 8


class _TomlModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Panel(_TomlModel):
    """One panel.

    Attributes:
        asks: PromQL queries, each with its legend.
        unit: Grafana's name of the unit.
        kind: lines over time, or the current value.
        width: in columns; a row has 24.
        seldom: when the panel may be empty; follows "Empty while" in its description.
    """

    title: str
    asks: Annotated[tuple[tuple[str, str], ...], Field(min_length=1)]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: Annotated[int, Field(ge=1, le=_COLUMNS)] = 8
    help: str = ""
    seldom: str | None = None


class Variable(_TomlModel):
    """A dashboard variable: the reader chooses from the values of a series' label."""

    name: str
    of: str
    label: str


class Dashboard(_TomlModel):
    """One dashboard."""

    name: str
    title: str
    panel: Annotated[tuple[Panel, ...], Field(min_length=1)]
    variable: tuple[Variable, ...] = ()


def read() -> list[Dashboard]:
    """All dashboards of dashboards.toml. Raises pydantic's ValidationError."""
    written = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return [Dashboard.model_validate(one) for one in written["dashboard"]]


def document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard's JSON document for Grafana. Raises `infra.promql.DriftError`."""
    return {
        "uid": f"tokenmill-{dashboard.name}",
        "title": dashboard.title,
        "description": "Generated from infra/grafana/dashboards.toml; change it there.",
        "tags": ["tokenmill"],
        "editable": False,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [_source(), *map(_variable, dashboard.variable)]},
        "panels": list(_panels(dashboard.panel)),
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.of}, {variable.label})"
    check(variable.of)
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _PROMETHEUS,
        "definition": query,
        "query": {"query": query, "refId": "values"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(panels: tuple[Panel, ...]) -> Iterator[dict[str, Any]]:
    x = y = below = 0
    for number, panel in enumerate(panels, 1):
        height = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
        if x + panel.width > _COLUMNS:
            x, y = 0, below
        below = max(below, y + height)
        grid_position = {"x": x, "y": y, "w": panel.width, "h": height}
        x += panel.width
        yield _panel(number, panel, grid_position)


def _panel(number: int, panel: Panel, grid_position: dict[str, int]) -> dict[str, Any]:
    for query, _ in panel.asks:
        check(query)
    description = panel.help if panel.seldom is None else f"{panel.help} Empty while {panel.seldom}.".strip()
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": description,
        "datasource": _PROMETHEUS,
        "gridPos": grid_position,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _PROMETHEUS,
                "expr": query,
                "legendFormat": legend or "__auto",
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for index, (query, legend) in enumerate(panel.asks)
        ],
    }


def text(dashboard: Dashboard) -> str:
    """Contents of the dashboard's JSON file."""
    return json.dumps(document(dashboard), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for dashboard in read():
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard), encoding="utf-8")
