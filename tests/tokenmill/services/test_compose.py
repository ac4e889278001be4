"""compose.yaml without containers: its own commands, settings and healthchecks, as processes on this machine.

What stands in for the network of containers are other addresses; for `demo`, a tiny model; for Apache's Kafka, the
broker of the other tests. CONTROL_PYTHON may name a Python in which only what the control image holds is installed.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx2
import pyarrow.parquet as pq
import pytest
import yaml
from kafka import KafkaProducer
from packaging.requirements import Requirement

from tests.servers.kafka import KafkaBroker
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.servers.seaweedfs import SeaweedServer
from tests.waiting import HANG_SECONDS, wait_for

ROOT = Path(__file__).parents[3]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
OURS = ("intake", "dispatcher", "gateway", "worker")
IMAGES = {name: (ROOT / f"infra/images/{name}.Dockerfile").read_text() for name in ("control", "worker")}
LINE = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    '"body": {"model": "demo", "prompt": "x", "max_tokens": 4, "temperature": 0}}\n'
)


class Redis(RedisServer):
    """With compose.yaml's options."""

    def command(self) -> list[str]:
        given = SERVICES["redis"]["command"]
        assert given[0] == "valkey-server"
        return [super().command()[0], *given[1:], "--port", str(self.port), "--bind", "127.0.0.1"]


class S3(SeaweedServer):
    """With compose.yaml's options, at addresses of this machine; checks compose.yaml's credentials."""

    access_key, secret_key = "tokenmill", "tokenmill-local"

    def command(self) -> list[str]:
        here = super().command()
        replaced = {option.partition("=")[0] for option in here[2:]}
        given = SERVICES["s3"]["command"]
        assert (SERVICES["s3"]["entrypoint"], given[0]) == (["weed"], "mini")
        return [*here, *(option for option in given[1:] if option.partition("=")[0] not in replaced)]


class Compose:
    """The services as processes. `addresses`: address in compose.yaml -> address here."""

    def __init__(self, folder: Path, addresses: dict[str, str], model: Path) -> None:
        self.folder = folder
        self.addresses = addresses
        self.model = model
        self.ports = {name: free_port() for name in OURS}
        self.gateway = free_port()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, name: str, text: str) -> str:
        for there, here in {
            **self.addresses,
            ":9100": f":{self.ports.get(name, 0)}",
            ":8000": f":{self.gateway}",
        }.items():
            text = text.replace(there, here)
        return text

    def variables(self, name: str) -> dict[str, str]:
        given = {
            key: self.here(name, re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value))
            for key, value in SERVICES[name]["environment"].items()
        }
        given["TOKENMILL_METRICS__PORT"] = str(self.ports.get(name, 0))
        # The broker of these tests acknowledges in another way than Kafka, and is slow to form groups.
        given |= {"TOKENMILL_KAFKA__IDEMPOTENCE": "false", "TOKENMILL_KAFKA__SESSION_TIMEOUT_SECONDS": "6"}
        inherited = {name: os.environ[name] for name in ("PATH", "HOME")} | {"OMP_NUM_THREADS": "1"}
        return {**inherited, **given, **({} if self.python(name) != sys.executable else {"PYTHONPATH": str(ROOT)})}

    @staticmethod
    def python(name: str) -> str:
        return sys.executable if name == "worker" else os.environ.get("CONTROL_PYTHON", sys.executable)

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python(name), *command],
            env=self.variables(name), cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def start(self, name: str) -> None:
        command = [self.here(name, word) for word in SERVICES[name]["command"]]
        command = [str(self.gateway) if word == "8000" else word for word in command]
        command = [f"demo={self.model}" if word == "demo" else word for word in command]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [self.python(name), "-m", "tokenmill", *command],
                env=self.variables(name), cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip

    def is_healthy(self, name: str) -> bool:
        assert self.running[name].poll() is None, (self.folder / f"{name}.log").read_text()
        kind, program, *rest = SERVICES[name]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        return self.run(name, *(self.here(name, word) for word in rest)).returncode == 0


@pytest.fixture
def compose(tmp_path: Path, model_folder: Path) -> Iterator[Compose]:
    with S3(tmp_path / "s3") as s3, Redis(tmp_path / "redis") as redis, KafkaBroker(tmp_path / "kafka") as kafka:
        addresses = {
            "s3:8333": f"127.0.0.1:{s3.port}",
            "redis:6379": f"127.0.0.1:{redis.port}",
            "kafka:9092": f"127.0.0.1:{kafka.port}",
        }
        made = Compose(tmp_path, addresses, model_folder)
        yield made
        for name, process in made.running.items():
            process.kill()
            process.wait()
            print(f"-- {name}\n{(tmp_path / f'{name}.log').read_text()[-3000:]}")


def test_given_each_service_then_its_memory_is_limited_and_so_are_redis_data() -> None:
    assert [name for name, service in SERVICES.items() if "mem_limit" not in service] == []
    assert "--maxmemory" in SERVICES["redis"]["command"]


@pytest.mark.exhaustive
def test_given_the_commands_of_compose_when_they_run_then_drops_records_and_http_are_answered(compose: Compose) -> None:
    for _ in range(2):  # the second run finds all of it there
        ended = compose.run("setup", str(ROOT / SERVICES["setup"]["volumes"][0].partition(":")[0]))
        assert ended.returncode == 0, ended.stderr
    for name in OURS:
        compose.start(name)
    for name in OURS:
        wait_for(lambda: compose.is_healthy(name), f"{name} is not healthy")  # noqa: B023 - it is called at once

    key = compose.run("gateway", "-m", "tokenmill", "keys", "create", "--tenant", "default", "--json")
    assert key.returncode == 0, key.stderr
    url = f"http://127.0.0.1:{compose.gateway}/v1/completions"
    body = {"model": "demo", "prompt": "x", "max_tokens": 4, "temperature": 0}
    assert httpx2.post(url, json=body).status_code == 401
    bearer = {"Authorization": f"Bearer {yaml.safe_load(key.stdout)['key']}"}
    answer = wait_for(lambda: _answer(url, body, bearer), "no answer over HTTP")
    text = answer["choices"][0]["text"]

    store = _client(compose)
    store.put_object(Bucket="tokenmill", Key="incoming/rows.jsonl", Body=LINE.encode())
    wait_for(lambda: len(_outcomes(store)) == 1, "the drop was not answered")
    _send(compose, LINE)
    wait_for(lambda: len(_outcomes(store)) == 2, "the record was not answered")
    assert _texts(store) == [text, text]

    for process in compose.running.values():
        process.send_signal(signal.SIGTERM)
    assert {name: process.wait(HANG_SECONDS) for name, process in compose.running.items()} == dict.fromkeys(OURS, 0)


def _answer(url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    answer = httpx2.post(url, json=body, headers=headers, timeout=HANG_SECONDS)
    return answer.json() if answer.status_code == 200 else None


def _client(compose: Compose) -> Any:
    return boto3.session.Session().client(
        "s3", endpoint_url=f"http://{compose.addresses['s3:8333']}", region_name="us-east-1",
        aws_access_key_id=S3.access_key, aws_secret_access_key=S3.secret_key,
    )  # fmt: skip


def _outcomes(store: Any) -> list[str]:
    found = store.list_objects_v2(Bucket="tokenmill", Prefix="jobs/").get("Contents", [])
    return [entry["Key"] for entry in found if entry["Key"].endswith("/manifest.json")]


def _texts(store: Any) -> list[str]:
    found = store.list_objects_v2(Bucket="tokenmill", Prefix="jobs/")["Contents"]
    parts = [entry["Key"] for entry in found if entry["Key"].endswith(".parquet") and "/results/" in entry["Key"]]
    tables = [pq.read_table(io.BytesIO(store.get_object(Bucket="tokenmill", Key=key)["Body"].read())) for key in parts]
    return [text for table in tables for text in table["text"].to_pylist()]


def _send(compose: Compose, line: str) -> None:
    producer = KafkaProducer(bootstrap_servers=compose.addresses["kafka:9092"], enable_idempotence=False)
    producer.send("tokenmill.requests", line.strip().encode()).get(HANG_SECONDS)
    producer.close()


@pytest.mark.parametrize("name", OURS)
def test_given_our_services_then_they_are_not_root_and_can_write_to_little(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_given_ports_that_are_published_then_only_this_machine_reaches_them() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("name", IMAGES)
def test_given_an_image_then_its_packages_exist_and_its_user_is_not_root(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = re.search(r'"\.\[(.+?)\]"', IMAGES[name])
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    assert ("engine" in extras[1].split(",")) == (name == "worker"), "the control side has no torch"
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= set(re.findall(r"^COPY (\w+) \w+$", IMAGES[name], re.MULTILINE))
    assert re.findall(r"^USER (.+)$", IMAGES[name], re.MULTILINE) == ["10001:10001"]


def test_given_the_images_packages_then_versions_are_pinned_and_allowed_by_the_project() -> None:
    lines = (ROOT / "infra/images/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = [
        project["optional-dependencies"][extra]
        for extra in ("aws", "engine", "gateway", "gpu", "kafka", "metrics", "redis", "tracing")
    ]
    for line in [*project["dependencies"], *(one for extra in used for one in extra)]:
        wanted = Requirement(line)
        if wanted.name == "triton":
            continue  # torch pins its own
        assert pins[wanted.name] in wanted.specifier, line
