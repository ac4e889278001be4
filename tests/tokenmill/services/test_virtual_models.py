"""Two models behind one name in a real `serve`: single requests and rows of a job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest
from openai import OpenAI

from tests.pipeline.observability.scrapes import scrape
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS

pytestmark = pytest.mark.exhaustive

RULES = """
name = "auto"
rules = [{ model = "large", when = { prompt_tokens = { min = 40 } } }, { model = "small" }]
"""


def test_each_request_is_answered_by_the_model_that_the_rules_choose(
    processes: Processes, model_folder: Path, chat: Any, tokenmill: Any, tmp_path: Path, tiny_models: Any
) -> None:
    large = tmp_path / "large"
    tiny_models.make_tiny_model("llama", large, vocab_size=300, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, large / name)
    served = processes.start(
        "-m", "tokenmill", "serve", "--data", "data", "--port", 0, "--dtype", "float32", "--threads", 1,
        "--model", f"small={model_folder}", "--model", f"large={large}",
    )  # fmt: skip
    url = processes.url(served)
    rules = tmp_path / "auto.toml"
    rules.write_text(RULES)
    assert tokenmill("models", "route", "set", rules, "--root", "data").code == 0
    texts = {"r0": "short", "r1": "word " * 60, "r2": "also short", "r3": "text " * 70}
    lines = [chat(name, text, max_tokens=4, model="auto") for name, text in texts.items()]
    wanted = ["small", "large", "small", "large"]

    with httpx2.Client(base_url=url, timeout=HANG_SECONDS) as http:
        for line, model in zip(lines[:2], wanted, strict=False):
            answer = http.post(line["url"], json=line["body"])
            assert (answer.headers["x-tokenmill-model"], answer.json()["model"]) == (model, "auto")
            alone = http.post(line["url"], json=line["body"] | {"model": model})
            assert alone.json()["choices"] == answer.json()["choices"], "it is that model's answer"
    client = OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key="none")
    assert {model.id for model in client.models.list()} == {"small", "large", "auto"}
    file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": lines[0]["url"], "completion_window": "24h"}
    done = ended(client, client.batches.create(**body, extra_body={"tokenmill": {"model": "auto"}}).id)
    assert (done.status, done.model) == ("completed", "auto")
    parts = sorted((processes.folder / "data" / "jobs" / done.id / "results").glob("part-*.parquet"))
    rows = sorted((row for part in parts for row in pq.read_table(part).to_pylist()), key=lambda row: row["row"])
    assert [(row["served_by"], row["model"]) for row in rows] == [(model, "auto") for model in wanted]
    assert json.loads(rows[0]["response"])["model"] == "auto"
    spending = json.loads((parts[0].parents[1] / "manifest.json").read_text())["spending"]
    assert {one["model"] for one in spending} == {"small", "large"}
    counted = scrape(f"{url}/metrics").all("tokenmill_virtual_model_requests_total", model="auto")
    assert sum(counted.values()) == 2
