"""Overload with real processes and a real Redis: bulk work is paused in a flood, and a gateway that dies meanwhile
leaves nothing paused, and nothing is lost."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.cluster import NULL_WORKER
from tests.cluster.lane_cluster import LaneCluster, cluster_of
from tests.cluster.null_worker import ExpectedAnswers
from tests.pipeline.observability.scrapes import scrape
from tests.servers.redis import RedisServer
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.exhaustive

ROWS = 150
OVERLOAD = {
    "TOKENMILL_OVERLOAD__SHED": "true",
    "TOKENMILL_OVERLOAD__STEPS": '["pause_bulk"]',
    "TOKENMILL_OVERLOAD__LEAVE_SECONDS": "600",
}


def chat(number: int, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"chat {number}"}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def bodies() -> list[dict[str, Any]]:
    body = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return [body | {"prompt": f"Item {row}: describe it."} for row in range(ROWS)]


def submit(client: httpx2.Client) -> str:
    """Submit the bulk job; returns its id."""
    lines = [
        {"custom_id": f"row-{row}", "method": "POST", "url": "/v1/completions", "body": body}
        for row, body in enumerate(bodies())
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    made = client.post("/v1/batches", json=order | {"tokenmill": {"tier": "bulk"}})
    assert made.status_code == 200, made.text
    job: str = made.json()["id"]
    return job


def is_paused(cluster: LaneCluster) -> bool:
    """Whether both workers have seen the step, at their last change."""
    changes = [
        [line for line in cluster.log(name).splitlines() if "degradation changed" in line]
        for name in ("worker-1", "worker-2")
    ]
    return all(found and "pause_bulk" in found[-1] for found in changes)


def test_a_gateway_that_dies_in_a_flood_leaves_nothing_paused_and_no_row_is_lost(
    tmp_path: Path, redis_server: RedisServer, model_folder: Path
) -> None:
    worker = (*NULL_WORKER, "--model", f"tiny={model_folder}", "--max-num-seqs", "4", "--step-ms", "20")
    (tmp_path / "c").mkdir()
    with cluster_of(tmp_path / "c", worker, redis_server, **OVERLOAD) as cluster:
        cluster.start("worker-1", "worker-2", "dispatcher", "gateway-1")
        cluster.variables = {name: value for name, value in cluster.variables.items() if name not in OVERLOAD}
        cluster.start("gateway-2")  # it has no overload control
        first, second = cluster.url("gateway-1"), cluster.url("gateway-2")
        with httpx2.Client(base_url=second, timeout=HANG_SECONDS) as client:
            # Given a bulk job at both workers, and a gateway that has measured them,
            job = submit(client)
            assert httpx2.post(f"{first}/v1/chat/completions", json=chat(0, 5), timeout=HANG_SECONDS).status_code == 200
            wait_for(
                lambda: scrape(f"{first}/metrics").all("tokenmill_forecast_wait_seconds"), "the load is not measured"
            )
            # when more chats come than the promise allows,
            codes: list[int] = []

            def ask(number: int) -> None:
                try:
                    url = f"{first}/v1/chat/completions"
                    codes.append(httpx2.post(url, json=chat(number, 200), timeout=HANG_SECONDS).status_code)
                except httpx2.HTTPError:
                    codes.append(0)  # the gateway was killed

            flood = [threading.Thread(target=ask, args=(number,)) for number in range(1, 41)]
            for thread in flood:
                thread.start()
            # then some are refused, and both workers pause bulk work;
            wait_for(lambda: 429 in codes and is_paused(cluster), "bulk work is not paused")
            # when that gateway dies, then bulk work resumes by itself,
            cluster.kill("gateway-1")
            wait_for(lambda: not is_paused(cluster), "bulk work is still paused")
            for thread in flood:
                thread.join()

            # and each row has the answer that it would have had.
            def ended() -> dict[str, Any] | None:
                batch: dict[str, Any] = client.get(f"/v1/batches/{job}").json()
                return batch if batch["status"] == "completed" else None

            batch = wait_for(ended, "the job did not end")
            assert batch["request_counts"] == {"total": ROWS, "completed": ROWS, "failed": 0}
            lines = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in map(json.loads, lines)}
    expected = ExpectedAnswers(model_folder).texts(bodies())
    assert answers == {f"row-{row}": text for row, text in enumerate(expected)}
