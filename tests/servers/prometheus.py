"""Prometheus: the system's own program (Debian's package `prometheus`), configured with targets and rules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.servers.process import MissingServer, ServerProcess, answers


class PrometheusServer(ServerProcess):
    """Scrapes `targets` (job -> "host:port", …) often, and evaluates the rules of `rules`."""

    name = "prometheus"

    def __init__(self, folder: Path, targets: dict[str, list[str]], rules: str, every: str = "500ms") -> None:
        super().__init__(folder)
        (folder / "rules.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": addresses}],
                    "metric_relabel_configs": [{"source_labels": ["worker"], "regex": ".+", "action": "drop"}],
                }
                for job, addresses in targets.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def command(self) -> list[str]:
        program = shutil.which("prometheus")
        if program is None:
            raise MissingServer("prometheus is missing; install it with: apt-get install prometheus")
        return [
            program, f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /-/ready HTTP/1.0\r\n\r\n", b"HTTP/1.0 200")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result now: [{"metric": labels, "value": (moment, text)}]."""
        with urlopen(
            f"http://127.0.0.1:{self.port}/api/v1/query?{urlencode({'query': expression})}", timeout=10
        ) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        values: list[dict[str, Any]] = found["data"]["result"]
        return values

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}
