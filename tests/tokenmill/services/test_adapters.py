"""`serve --adapter`: callers and jobs choose among a model and its adapters by name."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from tests.pipeline.observability.scrapes import scrape
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
NAMES = ("tiny", "a0", "a1", "a2")


@pytest.fixture
def engine(folder: Path, model_folder: Path, adapters: ModuleType) -> list[str]:
    """Adapters a0 to a2; the options that name them and their model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for number in range(3):
        adapters.make_adapter(model, folder / f"a{number}", number)
    given = [part for name in NAMES[1:] for part in ("--adapter", f"{name}={name}")]
    return ["--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1", *given, "--max-loras", "2"]


def content_of(response: Any) -> str:
    return str(response.choices[0].message.content)


def test_given_adapters_when_served_then_callers_and_jobs_get_the_answers_of_run(
    processes: Processes,
    engine: list[str],
    chat: Any,
    write_lines: Callable[..., Path],
    tokenmill: Any,
    results: Any,
) -> None:
    # Given the answers that `run` gives to four questions to each,
    lines = [chat(f"{name} {n}", f"number {n}", model=name, max_tokens=8) for n in range(4) for name in NAMES]
    assert tokenmill("run", write_lines(*lines), "--output", "alone", *engine).code == 0
    alone = {row["custom_id"]: row["text"] for row in results(processes.folder / "alone")}
    assert len({alone[f"{name} 0"] for name in NAMES}) == len(NAMES)
    answers = {"TOKENMILL_ANSWERS__ALWAYS": "true"}
    serve = ("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *engine)
    served = processes.start(*serve, **answers)
    client = OpenAI(base_url=f"{processes.url(served)}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0)

    # when they are served, each is a model of its own, which names its parent, and another name is refused.
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert {name: model["parent"] for name, model in models.items()} == dict.fromkeys(NAMES[1:], "tiny") | {
        "tiny": None
    }
    assert models["a1"]["root"] == str(processes.folder / "a1")
    assert len({model["tokenmill"]["digest"] for model in models.values()}) == len(NAMES)
    with pytest.raises(openai.NotFoundError, match=r"'a9' is not served here \(a0, a1, a2, tiny\)") as unknown:
        client.chat.completions.create(**{**lines[0]["body"], "model": "a9"})
    assert unknown.value.code == "model_not_found"

    # Then callers who ask at once beside a job, more than have a place, get their own adapter's answers,
    file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    def ask(line: dict[str, Any]) -> tuple[str, str, str]:
        response = client.chat.completions.create(**line["body"], extra_body={"tokenmill": {"cache": False}})
        return line["custom_id"], response.model, content_of(response)

    with ThreadPoolExecutor(8) as callers:
        asked = list(callers.map(ask, lines))
    assert {custom_id: text for custom_id, _, text in asked} == alone
    assert all(model == custom_id.split()[0] for custom_id, model, _ in asked)
    # as do the rows of the job, whose cost stands by adapter.
    done = ended(client, batch.id)
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in output} == alone
    manifest = json.loads(next((processes.folder / "data/jobs").glob("*/manifest.json")).read_bytes())
    assert {spent["model"] for spent in manifest["spending"]} == set(NAMES)
    # Metrics count both: 4 calls and 4 rows of each adapter.
    url = str(client.base_url).removesuffix("/v1/")

    def count() -> dict[str, float]:
        counted = scrape(f"{url}/metrics").all("tokenmill_adapter_requests_total", status="succeeded", model="tiny")
        return {adapter: number for (adapter, _), number in counted.items()}

    wait_for(lambda: count() == dict.fromkeys(NAMES[1:], 8), "the metrics don't count them")
    found = scrape(f"{url}/metrics")
    size = (processes.folder / "a0/adapter_model.safetensors").stat().st_size
    assert found.sum("tokenmill_adapter_weights_bytes", adapter="a0") == size
    assert found.sum("tokenmill_adapter_tokens_total", adapter="a0", kind="completion") > 8
    # Streams, completions and one version of an adapter are alike.
    stream = client.chat.completions.create(**lines[2]["body"], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == alone["a1 0"]
    texts = {client.completions.create(model=name, prompt="a message", temperature=0).choices[0].text for name in NAMES}
    assert len(texts) == len(NAMES)
    version = f"a1@{models['a1']['tokenmill']['digest']}"
    assert content_of(client.chat.completions.create(**{**lines[2]["body"], "model": version})) == alone["a1 0"]

    # Given another adapter in the folder of one of them, when they are served again, then its answers are new ones
    # though its former ones are stored, and those of the others are not computed again.
    process = processes.running[served]
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 0
    shutil.copy(processes.folder / "a2/adapter_model.safetensors", processes.folder / "a1/adapter_model.safetensors")
    served = processes.start(*serve, **answers)
    client = client.with_options(base_url=f"{processes.url(served)}/v1")
    again = {name: client.chat.completions.create(**lines[at]["body"]) for at, name in enumerate(NAMES)}
    assert {name: content_of(response) for name, response in again.items()} == {
        name: alone[f"{'a2' if name == 'a1' else name} 0"] for name in NAMES
    }
    cached = {name for name, response in again.items() if getattr(response.usage, "tokenmill_cached", False)}
    assert cached >= {"tiny", "a0", "a2"}


def test_given_workers_with_different_adapters_then_each_answers_for_its_own(
    processes: Processes, engine: list[str], chat: Any, redis_server: RedisServer, tokenmill: Any, folder: Path
) -> None:
    processes.variables |= {"TOKENMILL_REDIS_URL": redis_server.url, "TOKENMILL_ROOT": str(folder / "root")}
    command = "-m", "tokenmill"
    url = processes.url(processes.start(*command, "gateway", "--port", 0))
    for name, *more in (("a0",), ("a1",), ("a2", "--merge-adapter")):
        processes.start(*command, "worker", *engine[:6], "--adapter", f"{name}={name}", *more)
    processes.start(*command, "dispatcher")
    client = OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0)
    wait_for(lambda: len(client.models.list().data) == 4, "the adapters are not served")
    lines = [chat(f"{name} {n}", f"number {n}", model=name) for n in range(4) for name in NAMES]
    file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    texts = {line["custom_id"]: content_of(client.chat.completions.create(**line["body"])) for line in lines}
    done = ended(client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (16, 0)
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in output} == texts
    assert len({texts[f"{name} 0"] for name in NAMES}) == 4


def test_given_a_merged_adapter_when_served_then_it_is_the_only_model(
    processes: Processes, engine: list[str], chat: Any, write_lines: Callable[..., Path], tokenmill: Any, results: Any
) -> None:
    # Given the answers of an adapter beside its model,
    lines = [chat(f"{n}", f"number {n}", model="a0", max_tokens=8) for n in range(3)]
    assert tokenmill("run", write_lines(*lines), "--output", "alone", *engine[:8]).code == 0
    want = [row["text"] for row in results(processes.folder / "alone")]
    # when it is served merged, then it is listed alone, with the model as its parent,
    served = processes.start("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *engine[:8], "--merge-adapter")
    client = OpenAI(base_url=f"{processes.url(served)}/v1", timeout=HANG_SECONDS, api_key="none", max_retries=0)
    (model,) = [model.model_dump() for model in client.models.list()]
    assert (model["id"], model["parent"]) == ("a0", "tiny")
    # calls and a job by its name have the same answers as beside the model, which nothing answers for,
    assert [content_of(client.chat.completions.create(**line["body"])) for line in lines] == want
    hint = r"'tiny' is not served here \(a0\); a0 was merged into it: name a0, or leave out --merge-adapter"
    with pytest.raises(openai.NotFoundError, match=hint):
        client.chat.completions.create(**{**lines[0]["body"], "model": "tiny"})
    with pytest.raises(openai.NotFoundError, match=hint):
        client.models.retrieve("tiny")
    of_model = [chat("tiny", "number 0", model="tiny")]
    file = client.files.create(file=("in.jsonl", as_jsonl(lines + of_model)), purpose="batch")
    options = {"tokenmill": {"on_invalid": "row"}}
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_body=options)
    done = ended(client, batch.id)
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert [line["response"]["body"]["choices"][0]["message"]["content"] for line in output] == want
    error = json.loads(client.files.content(done.error_file_id).text)
    assert "a0 was merged into it" in error["error"]["message"]
    catalog = [json.loads(path.read_bytes())["pin"] for path in (processes.folder / "data/catalog").iterdir()]
    assert [(pin["name"], pin["base"], pin["merged"]) for pin in catalog] == [("a0", "tiny", True)]


def test_given_adapters_that_can_not_be_served_then_serve_says_why(
    folder: Path, tokenmill: Any, engine: list[str]
) -> None:
    def error(*more: str) -> str:
        refused: str = tokenmill("serve", "--data", folder / "data", "--port", 0, *engine, *more).error
        return refused

    assert "is the model's own name" in error("--adapter", "tiny=a0")
    assert "@sha256: names versions" in error("--adapter", "a@sha256:00=a0")
    assert "give one --model" in error("--model", f"other={engine[1].partition('=')[2]}")
    assert "adapters are for tokenmill's own code and vLLM" in error("--engine", "transformers")
    assert "no --replicas, --role or --adapter" in tokenmill(
        "worker", "--candidate", "--root", folder / "data", *engine
    ).error  # fmt: skip
    assert not (folder / "data/catalog").exists()
