"""The web page's files, and the status of the installation that it shows."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.gateway.http.api_keys import Scope
from pipeline.gateway.page import FOLDER
from pipeline.ports import WorkerState
from schemas.jobs.job import Tier
from schemas.workers.metrics import LATENCY_BOUNDS, HistogramSample, TierMetrics, WorkerMetrics
from tests.pipeline.gateway.http_harness import HttpHarness, lines, run_http_harness
from tests.pipeline.made_jobs import PIN
from tests.waiting import HANG_SECONDS

CHAT = "/v1/chat/completions"


@pytest.mark.slow
def test_the_page_has_a_content_security_policy_for_its_own_scripts_only(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in page.headers["content-security-policy"]
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\"/static/)|https?://", page.text)
        referenced = set(re.findall(r"/static/([\w.]+)", page.text))
        assert referenced <= {path.name for path in FOLDER.iterdir()}
        types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
        for path in FOLDER.iterdir():
            if path.suffix == ".html":
                continue
            response = http.get(f"/static/{path.name}")
            assert response.content == path.read_bytes()
            assert response.headers["content-type"] == types[path.suffix[1:]]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-security-policy"] == page.headers["content-security-policy"]
            revalidated = http.get(f"/static/{path.name}", headers={"If-None-Match": response.headers["etag"]})
            assert (revalidated.status_code, revalidated.content) == (304, b"")


def test_scripts_import_only_existing_files() -> None:
    file_names = {path.name for path in FOLDER.iterdir()}
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"from \"\./([\w.]+)\"", text)) <= file_names
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static/%2e%2e%2fpage.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/style.css%00.js",
        "/static/STYLE.CSS%20",
        "/static/",
        "/static",
        "/static/index.html/..",
        "/static/..\\page.py",
    ],
)
def test_static_files_allow_no_path_traversal(tmp_path: Path, path: str) -> None:
    with run_http_harness(tmp_path) as harness:
        address = urlsplit(harness.url)
        with socket.create_connection((address.hostname or "", address.port or 0), 10) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
            response = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert response.split(b" ", 2)[1] in (b"404", b"400"), response[:200]


def test_the_page_requires_no_key_and_the_status_does(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness:
        _, allowed = harness.keys.create("acme", (Scope.BATCHES,))
        _, forbidden = harness.keys.create("acme", (Scope.INFERENCE, Scope.FILES))
        with harness.http() as anonymous, harness.http(allowed) as permitted, harness.http(forbidden) as denied:
            assert anonymous.get("/").status_code == 200
            assert anonymous.get("/v1/status").status_code == 401
            assert denied.get("/v1/status").status_code == 403
            assert permitted.get("/v1/status").status_code == 200


def submit_job(harness: HttpHarness, key: str) -> str:
    client = harness.client(key)
    file = client.files.create(file=("in.jsonl", lines(10)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


@pytest.mark.slow
def test_the_status_has_workers_models_and_the_callers_own_backlog(tmp_path: Path) -> None:
    with run_http_harness(tmp_path, permits=0) as harness:
        scopes = (Scope.FILES, Scope.BATCHES)
        own, other = (harness.keys.create(tenant, scopes)[1] for tenant in ("a", "b"))
        _, monitoring = harness.keys.create("a", (*scopes, Scope.METRICS))
        _, admin = harness.keys.create("c", (Scope.ADMIN,))
        submit_job(harness, own)
        submit_job(harness, other)
        submit_job(harness, other)
        state = WorkerState("w2", frozenset({PIN.key, "gone"}), frozenset({("j", 1)}), 1_200, 310.5, draining=True)
        harness.beats.send_heartbeat(state)
        metrics = WorkerMetrics(model=PIN.name, tiers={Tier.BULK: TierMetrics(ttft=HistogramSample(counts=(0, 4)))})
        harness.beats.report_metrics("w2", metrics)

        received = {key: harness.http(key).get("/v1/status").json() for key in (own, other, monitoring, admin)}
        assert [received[key]["backlog"]["jobs"] for key in (own, other, monitoring, admin)] == [1, 2, 1, 3]
        kinds = received[own]["backlog"]["kinds"]
        assert [(kind["model"], kind["tier"], kind["jobs"]) for kind in kinds] == [(PIN.name, "standard", 1)]
        assert kinds[0]["tokens"] == received[own]["backlog"]["tokens"] > 0
        assert received[own]["models"] == [PIN.name]
        for key in (monitoring, admin):
            worker = next(worker for worker in received[key]["workers"] if worker["name"] == "w2")
            assert worker == {
                "name": "w2", "models": sorted([PIN.name, "gone"]), "shards": 1, "waiting_tokens": 1_200,
                "tokens_per_second": 310.5, "draining": True, "metrics": metrics.model_dump(mode="json"),
            }  # fmt: skip
            assert worker["metrics"]["tiers"]["bulk"]["ttft"]["counts"] == [0, 4]
            assert received[key]["lane"] == {"open": 0, "waiting": 0}
        for key in (own, other):  # the samples add up the work of all tenants
            assert {
                "name": None, "models": sorted([PIN.name, "gone"]), "shards": None, "waiting_tokens": None,
                "tokens_per_second": None, "draining": True, "metrics": None,
            } in received[key]["workers"]  # fmt: skip
            assert "w2" not in str(received[key])
            assert (received[key]["lane"], received[key]["answers"]) == (None, None)
        assert received[own]["latency_bounds"] == list(LATENCY_BOUNDS)


@pytest.mark.slow
def test_the_status_has_the_number_of_waiting_requests(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:

        def lane() -> dict[str, int]:
            counts: dict[str, int] = http.get("/v1/status").json()["lane"]
            return counts

        assert lane() == {"open": 0, "waiting": 0}
        harness.worker.stop_taking()
        body = {"model": PIN.name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
        harness.worker.pause = 0.02
        caller = threading.Thread(target=lambda: harness.http().post(CHAT, json=body))
        caller.start()
        wait_until(lambda: lane() == {"open": 1, "waiting": 1})
        harness.worker.hold.clear()
        wait_until(lambda: lane() == {"open": 1, "waiting": 0})
        caller.join()
        wait_until(lambda: lane() == {"open": 0, "waiting": 0})
        assert http.get("/v1/status").json()["answers"] == {"answered": 1}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
