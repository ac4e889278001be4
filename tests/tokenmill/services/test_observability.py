"""Prometheus watches real processes: dashboards have the metrics that they query, alerts fire on a failure, and end.

`make observability`. Each time in the rules is taken 60 times shorter, and the half hour that work may wait. What can't
be brought about from outside (a cache that is too small) is tried by promtool alone.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from tests.cluster.cluster import NULL_WORKER
from tests.infra.test_watching import NAMES, PROMETHEUS
from tests.servers.kafka import KafkaBroker
from tests.servers.process import MissingServer, free_port
from tests.servers.prometheus import PrometheusServer
from tests.servers.redis import RedisServer
from tests.tokenmill import dashboards
from tests.tokenmill.command_processes import Processes
from tests.tokenmill.small_disk import SIZE, resize, small_disk
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.exhaustive

FASTER = 60
BY_PROMTOOL_ALONE = {"TokenmillCacheTooSmall", "TokenmillGpuThrottled", "TokenmillUnexpectedErrors"}
"""The scheduler keeps more back the more it had to compute again, so a small cache alone doesn't bring it about; and an
unexpected error is a bug. Throttling needs a GPU that is too hot."""

PARTS = ("gateway", "dispatcher", "intake", "worker", "rival", "other", "autoscaler")


def hurried(rules: str) -> str:
    """The rules, with each time so many times shorter."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"s": 1, "m": 60, "h": 3600}[found[3]]
        return f"{found[1]}{max(1, round(seconds / FASTER))}s"

    waits = re.sub(
        r"(waiting_seconds\{[^}]*\}\)* > )(\d+)", lambda found: f"{found[1]}{round(int(found[2]) / FASTER)}", rules
    )
    return re.sub(r"(for: |\[)(\d+)([smh])\b", shorter, waits)


def test_given_rules_then_all_their_times_become_shorter() -> None:
    made = hurried("for: 30m\nexpr: rate(x[5m]) / increase(y[1h]) > 6 * 3600\nfor: 2m")
    assert made == "for: 30s\nexpr: rate(x[5s]) / increase(y[60s]) > 6 * 3600\nfor: 2s"
    assert hurried('expr: max(oldest_waiting_seconds{tier="standard"}) > 1800') == (
        'expr: max(oldest_waiting_seconds{tier="standard"}) > 30'
    )


class Harness:
    """An installation on a folder, Redis and Kafka, each process with a metrics port, and its Prometheus."""

    def __init__(self, folder: Path, root: Path, redis: RedisServer, kafka: KafkaBroker, model: Path) -> None:
        self.kafka, self.model = kafka, model
        self.ports = {name: free_port() for name in PARTS}
        self.prefix = f"o{secrets.token_hex(4)}"
        self.root = root
        self.processes = Processes(
            folder,
            TOKENMILL_ROOT=str(root),
            TOKENMILL_REDIS_URL=redis.url,
            TOKENMILL_KAFKA__BOOTSTRAP_SERVERS=f'["{kafka.bootstrap}"]',
            TOKENMILL_KAFKA__TOPIC_PREFIX=self.prefix,
            TOKENMILL_KAFKA__SESSION_TIMEOUT_SECONDS="2",
            TOKENMILL_KAFKA__IDEMPOTENCE="false",
        )
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        names = ("requests", "jobs", "results", "events", "deadletter")
        admin.create_topics([NewTopic(f"{self.prefix}.{name}", 1, 1) for name in names])
        admin.close()
        self.numbers: dict[str, int] = {}
        targets = {
            f"tokenmill-{job}": [f"127.0.0.1:{self.ports[name]}" for name in names]
            for job, names in {
                "gateway": ["gateway"], "dispatcher": ["dispatcher"], "intake": ["intake"],
                "worker": ["worker", "other"], "autoscaler": ["autoscaler"],
            }.items()
        }  # fmt: skip
        self.prometheus = PrometheusServer(
            folder / "prometheus", targets, hurried((PROMETHEUS / "alerts.yml").read_text())
        )
        try:
            self.prometheus.start()
        except MissingServer as error:
            pytest.skip(f"NOT TESTED HERE: {error}")

    def start(self, name: str, *program: object, **variables: str) -> None:
        self.numbers[name] = self.processes.start(*program, TOKENMILL_METRICS__PORT=str(self.ports[name]), **variables)

    def start_worker(self, step_ms: int, rows: int = 128, name: str = "worker", **variables: str) -> None:
        options = ("--model", f"tiny={self.model}", "--step-ms", step_ms, "--max-num-seqs", rows)
        self.start(name, *NULL_WORKER, *options, **variables)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        self.signal(name, number)
        self.processes.running[self.numbers[name]].wait(HANG_SECONDS)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes.running[self.numbers[name]].send_signal(number)

    @property
    def url(self) -> str:
        return self.processes.url(self.numbers["gateway"])

    def chat(self, tokens: int = 4, **how: Any) -> int:
        """Send a chat request and read its answer to the end; returns the status."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens} | how
        with httpx2.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=HANG_SECONDS) as answer:
            answer.read()
            return answer.status_code

    def batch(self, lines: list[str], **how: Any) -> str:
        """Send a batch; its id."""
        data = "\n".join(lines).encode()
        file = httpx2.post(
            f"{self.url}/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, timeout=60
        )
        order = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = httpx2.post(f"{self.url}/v1/batches", json=order | how, timeout=HANG_SECONDS)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    def is_firing(self, *names: str) -> None:
        left = set(names)
        try:
            wait_for(lambda: not left.difference_update(self.prometheus.firing()) and not left, "")
        except TimeoutError:
            raise AssertionError(f"{left} don't fire") from None
        print(f"fired: {', '.join(names)}")

    def workers(self) -> int:
        """That live and serve the null worker's model, by the dispatcher."""
        samples = self.prometheus.query('tokenmill_workers{model="tiny"}')
        return int(samples[0]["value"][1]) if samples else 0

    def has_no_backlog(self) -> None:
        """Wait until all jobs have ended."""
        wait_for(lambda: not self.prometheus.query("sum(tokenmill_backlog_tokens) > 0"), "jobs don't end")

    def is_silent(self, *names: str) -> None:
        wait_for(lambda: not set(names) & self.prometheus.firing(), f"{names} still fire")
        print(f"ended: {', '.join(names)}")


def row(name: str, tokens: int, content: str = "hello") -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{content} {name}"}], "max_tokens": tokens}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.fixture
def harness(
    folder: Path, redis_server: RedisServer, kafka_broker: KafkaBroker, model_folder: Path
) -> Iterator[Harness]:
    with small_disk(folder / "root") as root:
        made = Harness(folder, root, redis_server, kafka_broker, model_folder)
        yield made
        made.prometheus.close()
        made.processes.close()


class RepeatedCall:
    """Repeats an action on threads during the test; errors fail the test."""

    def __init__(self, what: Callable[[], object], threads: int = 1, pause: float = 0.05) -> None:
        self._stop = threading.Event()
        self._what, self._pause = what, pause
        self._errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause):
                self._what()
        except Exception as error:  # noqa: BLE001 - raised again at the end
            self._errors.append(error)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def test_dashboards_have_their_metrics_and_alerts_fire_and_end(harness: Harness) -> None:
    fired: set[str] = set()

    def incident(*names: str) -> None:
        harness.is_firing(*names)
        fired.update(names)

    # Nothing but a gateway and an intake: there is no dispatcher, and requests are refused since there is no model.
    harness.start("gateway", "-m", "tokenmill", "gateway", "--port", 0)
    harness.start("intake", "-m", "tokenmill", "intake")
    assert harness.chat() == 503
    with RepeatedCall(harness.chat):
        incident("TokenmillNoDispatcher", "TokenmillGatewayErrors", "TokenmillProcessDown")
    harness.start("dispatcher", "-m", "tokenmill", "dispatcher", "--price-per-hour", "2.5")
    harness.start_worker(20, TOKENMILL_CHECKPOINT_SECONDS="600")
    harness.start("autoscaler", "-m", "tokenmill", "autoscale", "--adapter", "http", "--interval", 1)
    engine = ("--dtype", "float32", "--threads", 1, "--speculate", "ngram")
    harness.start("other", "-m", "tokenmill", "worker", "--model", f"other={harness.model}", *engine)
    wait_for(lambda: harness.chat() == 200, "no worker answers")
    harness.is_silent("TokenmillNoDispatcher", "TokenmillGatewayErrors", "TokenmillProcessDown")

    # All is well: each panel has an answer, but for those that say when they are empty.
    harness.batch([row(f"w{number}", 40) for number in range(600)])
    small = RepeatedCall(lambda: harness.batch([row("small", 4)]), pause=4)
    drafted = RepeatedCall(lambda: harness.chat(60, model="other", temperature=0))
    with RepeatedCall(lambda: harness.chat(20, stream=True)), small, drafted:
        for text in dashboards.variables():
            assert harness.prometheus.query(text), text
        answers = dashboards.PanelAnswers(harness.prometheus, dashboards.questions())
        count = len(answers.left)
        try:
            wait_for(lambda: not any(one.seldom is None or "guess" in one.seldom for one in answers.poll()))
        except TimeoutError as error:
            error.add_note(f"without data: {answers.left}")
            raise

    # What comes in is wrong: half the rows of some jobs, another job as a whole, a record.
    harness.has_no_backlog()
    bad = [row(f"r{number}", 4) for number in range(5)] + ["not json"] * 5
    harness.batch(bad)
    producer = KafkaProducer(bootstrap_servers=harness.kafka.bootstrap, enable_idempotence=False)
    producer.send(f"{harness.prefix}.requests", b"not json").get(HANG_SECONDS)
    producer.close()
    with RepeatedCall(lambda: harness.batch(bad, tokenmill={"on_invalid": "row"}), pause=1):
        incident("TokenmillRowsFail", "TokenmillJobsFail", "TokenmillDeadLetters")
    harness.is_silent("TokenmillRowsFail", "TokenmillJobsFail", "TokenmillDeadLetters")

    # A worker that has logged nothing of its shard stands still until another one has the shard, and then goes on.
    harness.batch([row(f"t{number}", 120) for number in range(2_000)])
    wait_for(lambda: harness.prometheus.query('sum(tokenmill_shards{state="held"}) > 0'), "no shard is held")
    harness.start_worker(20, name="rival")
    wait_for(lambda: harness.workers() == 2, "there are no two workers")
    time.sleep(5)
    harness.signal("worker", signal.SIGSTOP)
    wait_for(lambda: harness.workers() == 1, "it isn't missed")
    time.sleep(3)
    harness.signal("worker", signal.SIGCONT)
    incident("TokenmillWorkRepeats")
    harness.end("rival")
    harness.is_silent("TokenmillWorkRepeats")
    harness.has_no_backlog()

    # The disk is full when the worker has a shard's results.
    harness.batch([row(f"d{number}", 60) for number in range(600)])
    wait_for(lambda: harness.prometheus.query('sum(tokenmill_shards{state="held"}) > 0'), "no shard is held")
    resize(harness.root, shutil.disk_usage(harness.root).used)
    incident("TokenmillStoreOutage")
    resize(harness.root, SIZE)
    harness.is_silent("TokenmillStoreOutage")
    harness.has_no_backlog()

    # The objects of a job are damaged.
    before = set(harness.root.glob("jobs/*/plan/00000.json"))
    harness.batch([row(f"o{number}", 60) for number in range(600)])
    plans = wait_for(lambda: set(harness.root.glob("jobs/*/plan/00000.json")) - before, "it isn't planned")
    job = plans.pop().parent.parent
    (job / "closing.json").write_text("{")
    (harness.root / "close").mkdir(exist_ok=True)
    (harness.root / "close" / job.name).touch()
    incident("TokenmillJobsNeedAttention")
    (job / "closing.json").unlink()
    harness.is_silent("TokenmillJobsNeedAttention")
    harness.has_no_backlog()

    # The worker of a job is killed; another lives, and can't take its shards, which wait.
    harness.batch([row(f"k{number}", 60) for number in range(3_000)])
    wait_for(lambda: harness.prometheus.query('sum(tokenmill_shards{state="held"}) > 0'), "no shard is held")
    harness.end("worker", signal.SIGKILL)
    incident("TokenmillProcessDown", "TokenmillNoWorkers", "TokenmillWorkStalls", "TokenmillStandardWorkWaits")
    answers.poll()
    harness.start_worker(1)
    harness.is_silent("TokenmillProcessDown", "TokenmillNoWorkers", "TokenmillWorkStalls", "TokenmillStandardWorkWaits")
    harness.has_no_backlog()

    # Steps become slow, and rows few: streams begin late, stutter, requests with little time fail, and a job that the
    # worker of before would have done in seconds has hours before it.
    harness.end("worker")
    harness.start_worker(700, rows=1)
    harness.batch([row(f"s{number}", 120) for number in range(3_000)])
    impatient = {"tokenmill": {"timeout": 1}}
    slow = (
        "TokenmillSlowFirstTokens", "TokenmillSlowTokens", "TokenmillLowGoodput", "TokenmillAnswersFail",
        "TokenmillBacklogTooLong",
    )  # fmt: skip
    with (
        RepeatedCall(lambda: harness.chat(4, stream=True), threads=4),
        RepeatedCall(lambda: harness.chat(4, **impatient), threads=2),
    ):
        incident(*slow)
    harness.end("worker")
    harness.start_worker(1)
    harness.is_silent(*slow)
    harness.has_no_backlog()

    # Nothing is left to do; then one of the two models has something.
    incident("TokenmillIdleWorkers")
    idle = 'ALERTS{alertname="TokenmillIdleWorkers",alertstate="firing",model="tiny"}'
    wait_for(lambda: harness.prometheus.query(idle), "it doesn't fire for each model")
    with RepeatedCall(harness.chat):
        wait_for(lambda: not harness.prometheus.query(idle), "it fires on")
    assert fired | BY_PROMTOOL_ALONE == set(NAMES)
    assert {one.panel for one in answers.left} == {
        one.panel for one in dashboards.questions() if one.seldom in dashboards.ABSENT
    }  # fmt: skip
    print(f"{count - len(answers.left)} of {count} queries had an answer; others need what this installation lacks")
