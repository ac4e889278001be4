"""Prompts and responses are in no log; keys are in no log and in no object of the store."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.gateway.http.api_keys import Scope
from tests.patient_websocket import connect
from tests.pipeline.gateway.http_harness import run_http_harness
from tests.waiting import HANG_SECONDS

CANARY = "kanarienvogel7261"
ANSWER = "wellensittich9938 "
CHAT = "/v1/chat/completions"


@pytest.mark.slow
def test_prompts_responses_and_keys_are_not_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run_http_harness(tmp_path) as harness:
        harness.worker.text = ANSWER
        _, key = harness.keys.create("acme", tuple(Scope))
        client = harness.client(key)
        body: Any = {"model": "tiny", "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3}
        assert client.chat.completions.create(**body).choices
        assert list(client.chat.completions.create(**body, stream=True))
        client.completions.create(model="tiny", prompt=CANARY, max_tokens=3)
        wrong: list[dict[str, Any]] = [
            {"model": CANARY}, {"temperature": CANARY}, {"stop": [CANARY] * 100}, {"user": [CANARY]},
            {"messages": [{"role": CANARY, "content": CANARY}]}, {"messages": CANARY},
            {"metadata": {CANARY: 1}}, {"tools": [CANARY]}, {"response_format": {"type": CANARY}},
            {"extra_body": {CANARY: CANARY}}, {"extra_body": {"tokenmill": {CANARY: CANARY}}},
        ]  # fmt: skip
        for more in wrong:
            with pytest.raises(openai.APIStatusError):
                client.chat.completions.create(**{**body, **more})
        with harness.http(key) as http:
            headers = {"Content-Type": "application/json", "User-Agent": CANARY, "Referer": CANARY}
            assert http.post(CHAT, content=f'{{"{CANARY}'.encode(), headers=headers).status_code == 400
            assert http.post(f"{CHAT}?{CANARY}={CANARY}", json=body).status_code == 200
            http.post("/v1/files", content=CANARY.encode() * 10, headers={"Content-Type": "multipart/form-data"})
            http.get("/v1/files", headers={"Authorization": f"Bearer {CANARY}"})
            http.post("/v1/batches", json={"input_file_id": CANARY, "metadata": {CANARY: CANARY}})
        url = harness.url.replace("http", "ws") + "/v1/stream"
        with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
            socket.send(json.dumps({"type": "request", "url": CHAT, "body": body}))
            while json.loads(socket.recv())["type"] not in ("done", "error"):
                pass
            socket.send(CANARY)
            assert "invalid_json" in str(socket.recv())
        good = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
        data = (
            json.dumps(good)
            + "\n"
            + json.dumps({**good, "custom_id": CANARY, "body": {"model": CANARY}})
            + "\n"
            + CANARY
        )
        file = client.files.create(file=(f"{CANARY}.jsonl", data.encode()), purpose="batch")
        for on_invalid in ("row", "job"):
            batch = client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"note": CANARY},
                extra_body={"tokenmill": {"on_invalid": on_invalid}},
            )  # fmt: skip
            until = time.monotonic() + HANG_SECONDS
            while client.batches.retrieve(batch.id).status not in ("completed", "failed"):
                assert time.monotonic() < until
                time.sleep(0.05)
        ended = client.batches.retrieve(batch.id)
        assert ended.metadata == {"note": CANARY}, "the canary did sing"
    said = "".join(capfd.readouterr())
    assert "request" in said
    assert CHAT in said
    secret = key.rsplit("-", 1)[1]
    for word in (CANARY, ANSWER.strip(), secret):
        lines = [line for line in said.splitlines() if word in line]
        assert not lines, lines[:3]
    stored = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    assert any(path.parts[-3] == "files" and CANARY.encode() in path.read_bytes() for path in stored)
    allowed = {"files", "jobs", "batches"}
    for path in stored:
        content = path.read_bytes()
        assert secret.encode() not in content, path
        if path.relative_to(tmp_path / "root").parts[0] not in allowed:
            assert CANARY.encode() not in content, path
