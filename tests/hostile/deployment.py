"""A deployment under attack: tokenmill's processes with limited memory, restarted when they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.gateway.http.api_keys import ApiKeys, Scope
from pipeline.ports import ObjectStore, World
from schemas.requests.limits import RateLimits
from tests.cluster.cluster import NULL_WORKER, ROOT, running_cluster, settings_of
from tests.hostile.attack import Answer, Form, Target
from tests.hostile.client import CHAT, chat, request
from tests.hostile.memory import Memory
from tests.hostile.objects import Objects
from tests.servers.process import free_port
from tests.waiting import wait_for

QUOTAS: Final = {"stored_bytes": 64 << 20, "stored_files": 50}
"""Quotas of the tenant "limited", if the version under attack supports quotas."""
MEMORY_KIB: Final = 8 << 20
"""Address space limit of a process: a memory bomb ends the process before it affects the machine."""
LIMITED: Final = ("sh", "-c", 'ulimit -v "$0" && exec "$@"', str(MEMORY_KIB))

TENANTS: Final = ("good", "bad", "other", "limited")
READY_SECONDS: Final = 180.0
POLL_SECONDS: Final = 0.2
RESTART_SECONDS: Final = 1.0
STOP_SECONDS: Final = 40.0

ENGINE: Final = ("--max-num-seqs", "32")
DEMO_ENGINE: Final = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory", "512MB")
VARIABLES: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENMILL_DEFAULT_MODEL": "demo",
    "TOKENMILL_DEFAULT_MAX_TOKENS": "16",
    "TOKENMILL_PLAN__MAX_SHARD_ROWS": "20",
    "TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS": "10",
    # So small that an attack can fill it in seconds.
    "TOKENMILL_ANSWERS__MAX_MEMORY_BYTES": "1000000",
}


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """A process that ended without SIGTERM; `at`: `time.monotonic`; `log_end`: the end of its log."""

    name: str
    code: int
    at: float
    log_end: str


@dataclass
class Deployment:
    """Processes by name, and how to reach them.

    Attributes:
        commands: process name -> what is run, behind Python.
        pids: of the first start.
        deaths: of processes that ended by themselves; each was started again.
        restarts: by the harness, because an attack had left behind what would not end; why.
    """

    form: Form
    folder: Path
    root: str
    s3_endpoint: str | None
    port: int
    commands: dict[str, tuple[str, ...]]
    worker_command: tuple[str, ...]
    variables: dict[str, str]
    webhook_port: int
    keys: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    deaths: list[ProcessDeath] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.memory = Memory(lambda: {name: process.pid for name, process in self.processes.items()})

    @property
    def objects(self) -> Objects:
        return Objects(self.root, self.s3_endpoint)

    def start(self) -> None:
        """Start all, and return when a chat is answered."""
        for name in self.commands:
            self._start(name)
        self.pids = {name: process.pid for name, process in self.processes.items()}
        self._supervisor.start()
        self.memory.start()
        self.await_ready()

    def target(self, seed: int, uploaded_files: int, dropped_files: int) -> Target:
        """The deployment, as attacks take it."""
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        return Target(
            form=self.form, host="127.0.0.1", port=self.port, keys=self.keys, root=self.root,
            s3_endpoint=self.s3_endpoint, scratch=str(scratch),
            pids={name: process.pid for name, process in self.processes.items()},
            worker_command=self.worker_command, variables=self.variables, webhook_port=self.webhook_port,
            seed=seed, uploaded_files=uploaded_files, dropped_files=dropped_files,
        )  # fmt: skip

    def answers(self) -> bool:
        """Whether a chat of a bystander is answered now."""
        return self.request("POST", CHAT, chat("are you ready"), key="other", seconds=30.0).status == "200"

    def request(self, method: str, path: str, body: object = None, *, key: str, seconds: float = 60.0) -> Answer:
        return request(self.target(0, 0, 0), method, path, body, key=key, seconds=seconds)

    def await_ready(self) -> None:
        wait_for(self.answers, f"the deployment ({self.form}) answers no chat; logs in {self.folder}")

    def restart_without(self, jobs: set[str], why: str) -> None:
        """What an operator does by hand: kill all, take these jobs and all dropped files out of the root, start."""
        self.restarts.append(why)
        with self._lock:
            for process in self.processes.values():
                process.kill()
                process.wait()
            self.objects.remove("incoming/")
            self.remove_jobs(jobs)
            for name in self.commands:
                self._start(name)
        self.await_ready()

    def remove_jobs(self, jobs: set[str]) -> None:
        """Take jobs out of the root, while all goes on: what an operator does with damaged ones."""
        for job in jobs:
            for key in (f"jobs/{job}/", f"active/{job}", f"close/{job}"):
                self.objects.remove(key)

    def close(self) -> dict[str, int]:
        """End all in order; their exit codes."""
        self._stop.set()
        self._supervisor.join()
        self.memory.close()
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        return codes

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*LIMITED, sys.executable, *self.commands[name]],
                stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **self.variables},
            )  # fmt: skip

    def _supervise(self) -> None:
        """Starts again what has died."""
        while not self._stop.wait(POLL_SECONDS):
            with self._lock:
                dead = [name for name, process in self.processes.items() if process.poll() is not None]
                for name in dead:
                    code = self.processes[name].returncode
                    self.deaths.append(ProcessDeath(name, code, time.monotonic(), self.log(name)[-600:]))
                    self._stop.wait(RESTART_SECONDS)
                    self._start(name)


def make_keys(store: ObjectStore, scratch: Path) -> dict[str, str]:
    """An API key for each tenant, of its name."""
    keys = ApiKeys(World(store, SystemClock(), SystemRandomness(), scratch))
    scopes = (Scope.FILES, Scope.BATCHES, Scope.INFERENCE)
    return {tenant: keys.create(tenant, scopes)[1] for tenant in TENANTS}


@contextmanager
def deployed(
    form: Form, folder: Path, worker: str = "demo", model: str = "demo", settings: Mapping[str, str] | None = None
) -> Iterator[Deployment]:
    """A deployment that answers, until the block ends.

    Args:
        worker: "demo" computes; "null" answers without a model (a cluster's only).
        model: what is loaded under the name "demo".
        settings: further environment variables of the processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    webhook_port = free_port()
    hooks = [{"url": f"https://{host}/hook", "secret": f"whsec_{'A' * 32}"}
             for host in (f"127.0.0.1:{webhook_port}", "169.254.169.254", f"localhost:{webhook_port}")]  # fmt: skip
    quotas = {name: limit for name, limit in QUOTAS.items() if name in RateLimits.model_fields}
    variables = {
        **VARIABLES, "PYTHONPATH": str(ROOT),
        "TOKENMILL_GATEWAY__WEBHOOKS__ENDPOINTS": json.dumps({"bad": hooks}),
        "TOKENMILL_GATEWAY__TENANTS": json.dumps({"limited": quotas}), **(settings or {}),
    }  # fmt: skip
    with ExitStack() as stack:
        made = _cluster if form == "cluster" else _serve
        deployment = made(stack, folder, worker, f"demo={model}", variables, webhook_port)
        try:
            deployment.start()
            yield deployment
        finally:
            for name, code in deployment.close().items():
                print(f"{form}: {name} ended with {code} on SIGTERM", file=sys.stderr)


def _cluster(
    stack: ExitStack, folder: Path, worker: str, model: str, variables: dict[str, str], webhook_port: int
) -> Deployment:
    """Gateway, dispatcher, intake and worker on Redis and S3."""
    servers = stack.enter_context(running_cluster(folder / "servers", (), ()))
    store = S3Store.from_url(servers.root, settings_of(servers.s3))
    stack.callback(store.close)
    port = free_port()
    program = NULL_WORKER if worker == "null" else ("-m", "tokenmill", "worker")
    engine = ("--step-ms", "8") if worker == "null" else DEMO_ENGINE
    command = (*program, "--model", model, *ENGINE, *engine)
    return Deployment(
        "cluster", folder, servers.root, servers.s3.endpoint, port,
        {
            "gateway": ("-m", "tokenmill", "gateway", "--port", str(port)),
            "dispatcher": ("-m", "tokenmill", "dispatcher"),
            "intake": ("-m", "tokenmill", "intake"),
            "worker": command,
        },
        (*LIMITED, sys.executable, *command), {**servers.variables, **variables}, webhook_port,
        keys=make_keys(store, folder),
    )  # fmt: skip


def _serve(
    stack: ExitStack, folder: Path, worker: str, model: str, variables: dict[str, str], webhook_port: int
) -> Deployment:
    """Everything in one process, on a folder."""
    root = folder / "root"
    with FolderStore(root) as store:
        keys = make_keys(store, folder)
    port = free_port()
    command = ("-m", "tokenmill", "serve", "--data", str(root), "--port", str(port), "--model", model)
    return Deployment(
        "serve", folder, str(root), None, port, {"serve": (*command, "--settle", "0.5", *ENGINE, *DEMO_ENGINE)},
        (), variables, webhook_port, keys=keys,
    )  # fmt: skip
