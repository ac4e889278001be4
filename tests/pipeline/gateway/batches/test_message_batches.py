"""Message batches that aren't created: what the error says, and that nothing of them stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from pipeline.ingest.intake import Intake
from pipeline.ports import StoreUnavailable
from tests.pipeline.gateway.http_harness import run_http_harness

URL = "/v1/messages/batches"
PARAMS = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
ONE = {"requests": [{"custom_id": "a", "params": PARAMS}]}


def left(http: httpx2.Client) -> list[Any]:
    """The files and batches that are there."""
    return [*http.get("/v1/files").json()["data"], *http.get(URL).json()["data"]]


def test_errors_name_the_field_as_a_path(tmp_path: Path) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:

        def refusal(body: dict[str, Any]) -> str:
            response = http.post(URL, json=body)
            assert response.status_code == 400
            message: str = response.json()["error"]["message"]
            return message

        assert refusal({}) == "requests is missing; add it"
        assert refusal({"requests": []}) == "requests is empty; give at least one"
        assert refusal({"requests": [{"custom_id": "a"}]}) == "requests[0].params is missing; add it"
        assert refusal({"requests": [{**ONE["requests"][0], "custom_id": 5}]}) == (
            "requests[0].custom_id is 5, but must be a string"
        )
        assert refusal({**ONE, "requestz": 1}) == "requestz is not a parameter known here; remove it"
        assert left(http) == []


def test_a_failed_submission_leaves_nothing_and_a_later_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: Any) -> None:
        raise StoreUnavailable("the store is away")

    with run_http_harness(tmp_path) as harness, harness.http() as http:
        with monkeypatch.context() as broken:
            broken.setattr(Intake, "accept", unavailable)
            assert http.post(URL, json=ONE).status_code >= 500
        assert left(http) == []
        made = http.post(URL, json=ONE).json()["id"]
        assert [one["id"] for one in http.get(URL).json()["data"]] == [made]
