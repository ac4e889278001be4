"""Prefill and decode workers as processes, with a gateway and a real Redis; KV blocks pass a proxy that may damage
them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from tests.cluster.cluster import ROOT
from tests.servers.faulty_tcp import FaultyTcp
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_for

PROXY_HOST = "127.0.0.2"
"""Where decode workers connect: the proxy listens there, on the port that the prefill worker has at 127.0.0.1."""


@dataclass
class HandoverCluster:
    """Processes by name: "gateway", and workers by their role: "prefill-1", "decode-1", "both-1".

    Attributes:
        engine: options of workers.  blocks: the proxy between decode workers and the prefill worker.
    """

    folder: Path
    engine: tuple[str, ...]
    variables: dict[str, str]
    blocks: FaultyTcp
    port: int = field(default_factory=free_port)
    metrics: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *names: str) -> None:
        """Start these, or start them again, and wait until they are up."""
        starts = {name: self._count_starts(name) for name in names}
        for name in names:
            role = name.partition("-")[0]
            metrics = self.metrics.setdefault(name, free_port())
            program = ["worker", *self.engine, "--role", role, "--metrics-port", str(metrics)]
            if role == "gateway":
                program = ["gateway", "--port", str(self.port)]
            with self._log_of(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "tokenmill", *program],
                    stdout=log, stderr=log, env={**os.environ, **self.variables},
                )  # fmt: skip
        for name in names:
            wait_for(lambda name=name: self._is_up(name, starts[name]), f"{name} is not up")

    def kill(self, name: str) -> None:
        """Kill it (SIGKILL)."""
        self.processes[name].kill()
        self.processes[name].wait()

    def send(self, name: str, signal_number: signal.Signals) -> None:
        self.processes[name].send_signal(signal_number)

    def log(self, name: str) -> str:
        return self._log_of(name).read_text(errors="replace") if self._log_of(name).exists() else ""

    def metric(self, name: str, metric: str, label: str) -> float:
        """The sum of a worker's metric over all lines with this label, such as outcome="sent"."""
        with urlopen(f"http://127.0.0.1:{self.metrics[name]}/metrics") as page:
            found = re.findall(rf"^{metric}\{{(.*)\}} ([0-9.e+-]+)$", page.read().decode(), re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels.split(","))

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _count_starts(self, name: str) -> int:
        return len(re.findall(r"^(?:serving http|working for) ?", self.log(name), re.MULTILINE))

    def _is_up(self, name: str, starts_before: int) -> bool:
        if self.processes[name].poll() is not None:
            raise ChildProcessError(f"{name} ended:\n{self.log(name)[-3_000:]}")
        return self._count_starts(name) > starts_before


@contextmanager
def handover_cluster(
    folder: Path, engine: Sequence[object], redis: RedisServer, **variables: str
) -> Iterator[HandoverCluster]:
    """Only Redis and the proxy run in it yet; all started processes end with the block."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        port = free_port()
        proxy = stack.enter_context(FaultyTcp(port, (PROXY_HOST, port)))
        made = HandoverCluster(
            folder,
            tuple(str(option) for option in engine),
            {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TOKENMILL_ROOT": str(folder / "root"),
                "TOKENMILL_REDIS_URL": redis.url,
                "TOKENMILL_KV_TRANSFER__PORT": str(port),
                "TOKENMILL_KV_TRANSFER__ADVERTISED_HOST": PROXY_HOST,
                "TOKENMILL_KV_TRANSFER__SHARED_MEMORY": "false",
                "TOKENMILL_KV_TRANSFER__TIMEOUT_SECONDS": "2",
                # A slow machine's workers would compute each other's requests, and transfer nothing.
                "TOKENMILL_KV_TRANSFER__HELP_AFTER_SECONDS": "10",
                "TOKENMILL_KV_TRANSFER__HAND_OVER": "always",  # or most would stay where they are, at this size
                **variables,
            },
            proxy,
        )
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait()
