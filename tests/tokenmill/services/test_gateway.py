"""HTTP from end to end: the official client against `tokenmill serve`, and against a gateway on Redis."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.cluster.cluster import NULL_WORKER
from tests.cluster.null_worker import ExpectedAnswers
from tests.pipeline.gateway.webhooks.receiver import Receiver
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.kill()


@pytest.mark.exhaustive
def test_serve_answers_the_official_client_as_run_would(
    processes: Processes,
    model_folder: Path,
    chat: Any,
    write_lines: Callable[..., Path],
    tokenmill: Any,
    results: Any,
) -> None:
    lines = [chat(f"r{n}", f"number {n}", max_tokens=8) for n in range(12)]
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1)
    assert tokenmill("run", write_lines(*lines), "--output", "alone", *engine).code == 0
    alone = {row["custom_id"]: row["text"] for row in results(processes.folder / "alone")}
    served = processes.start("-m", "tokenmill", "serve", "--data", "data", "--port", 0, *engine)
    client = OpenAI(base_url=f"{processes.url(served)}/v1", timeout=HANG_SECONDS, api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]

    file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    done = ended(client, batch.id)
    assert done.status == "completed", done
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in output}
    assert texts == alone

    body = lines[0]["body"]
    whole = client.chat.completions.create(**body)
    assert whole.choices[0].message.content == alone["r0"]
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == alone["r0"]
    assert (chunks[-1].usage, chunks[-2].choices[0].finish_reason) == (whole.usage, whole.choices[0].finish_reason)
    text = client.completions.create(model="tiny", prompt="a message", max_tokens=6, temperature=0, logprobs=1)
    streamed = list(
        client.completions.create(
            model="tiny", prompt="a message", max_tokens=6, temperature=0, logprobs=1, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text
    assert streamed[-1].choices[0].logprobs == text.choices[0].logprobs
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**body, "max_tokens": 5_000})
    assert refused.value.code == "context_length_exceeded"

    made = tokenmill("keys", "create", "--root", "data", "--tenant", "acme", "--scope", "inference", "--json")
    key = json.loads(made.out)["key"]
    wait_for(lambda: httpx2.get(f"{client.base_url}models").status_code == 401, "it lets anybody in")
    client = client.with_options(api_key=key)
    assert client.chat.completions.create(**body).choices[0].message.content == alone["r0"]
    with pytest.raises(openai.PermissionDeniedError):
        client.files.list()
    process = processes.running[served]
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 0
    said = processes.log(served).read_text()
    assert "number 3" not in said, "prompts are in the log"
    assert key not in said


@pytest.mark.exhaustive
def test_serve_embeds_for_the_official_client(processes: Processes, embedding_model: Path) -> None:
    served = processes.start(
        "-m", "tokenmill", "serve", "--data", "data", "--port", 0, "--model", f"tiny={embedding_model}", "--threads", 1
    )
    client = OpenAI(base_url=f"{processes.url(served)}/v1", timeout=HANG_SECONDS, api_key="none")
    texts = [f"text number {number}" for number in range(5)]
    packed = client.embeddings.create(model="tiny", input=texts)  # the client requests base64 by itself
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1, 2, 3, 4]
    vectors = [one.embedding for one in plain.data]
    assert {len(vector) for vector in vectors} == {32}
    for mine, theirs in zip(packed.data, vectors, strict=True):
        assert mine.embedding == pytest.approx(theirs, abs=1e-6)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 5
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="tiny", input="word " * 40)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="makes embeddings and generates nothing"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    url = "/v1/embeddings"
    lines = [
        {"custom_id": text, "method": "POST", "url": url, "body": {"model": "tiny", "input": text}} for text in texts
    ]
    file = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    done = ended(client, batch.id)
    assert done.status == "completed", done
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["data"][0]["embedding"] for line in output}
    for text, vector in zip(texts, vectors, strict=True):
        assert found[text] == pytest.approx(vector, abs=1e-6)


def test_a_gateway_on_redis_streams_from_workers_elsewhere_and_drains(
    processes: Processes, redis_server: RedisServer, model_folder: Path, chat: Any, receiver: Receiver, folder: Path
) -> None:
    processes.variables |= {"TOKENMILL_REDIS_URL": redis_server.url, "TOKENMILL_ROOT": str(folder / "root")}
    options = ("--model", f"tiny={model_folder}", "--max-num-seqs", 8, "--step-ms", 20)
    endpoint = {"url": receiver.url("/hook/secret"), "secret": f"whsec_{'A' * 32}"}
    protection = {"tenant_limits": {"tokens_per_minute": 1_000_000, "running_requests": 3}, "webhooks": {
        "endpoints": {"default": [endpoint]}, "allow_http": True, "allow_private": True,
    }}  # fmt: skip
    variables = {f"TOKENMILL_GATEWAY__{name.upper()}": json.dumps(value) for name, value in protection.items()}
    gateway = processes.start("-m", "tokenmill", "gateway", "--port", 0, **variables)
    processes.start(*NULL_WORKER, *options)
    processes.start("-m", "tokenmill", "dispatcher")
    client = OpenAI(base_url=f"{processes.url(gateway)}/v1", timeout=HANG_SECONDS, api_key="none")
    wait_for(lambda: client.models.list().data, "no worker is up")
    bodies = [chat("", f"number {n}", max_tokens=100)["body"] for n in range(3)]
    going: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
    streams = [client.chat.completions.create(**body, **going) for body in bodies]
    beginnings = [next(iter(stream)) for stream in streams]
    assert int(streams[2].response.headers["x-ratelimit-remaining-tokens"]) < 1_000_000 - 300
    with pytest.raises(openai.RateLimitError, match="this tenant has 3 requests under way"):
        client.with_options(max_retries=0).chat.completions.create(**bodies[0])
    file = client.files.create(file=("in.jsonl", as_jsonl([chat("r", "row")])), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h")
    assert ended(client, batch.id).status == "completed"
    wait_for(lambda: receiver.received, "no webhook was sent")
    event = OpenAI(api_key="x", webhook_secret=endpoint["secret"]).webhooks.unwrap(
        receiver.received[0].body, receiver.received[0].headers
    )
    assert (event.type, event.data.id) == ("batch.completed", batch.id)
    assert "secret" not in processes.log(gateway).read_text(), "a webhook's URL may hold a secret"
    processes.running[gateway].send_signal(signal.SIGTERM)
    texts = ["".join(chunk.choices[0].delta.content or "" for chunk in stream) for stream in streams]
    assert texts == ExpectedAnswers(model_folder).texts(bodies)
    assert {chunk.choices[0].delta.role for chunk in beginnings} == {"assistant"}
    assert processes.running[gateway].wait(HANG_SECONDS) == 0


def test_an_open_address_needs_a_key(folder: Path, tokenmill: Any, redis_server: RedisServer, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKENMILL_REDIS_URL", redis_server.url)
    refused = tokenmill("gateway", "--root", "root", "--host", "0.0.0.0", "--port", 0)
    assert (refused.code, "there is no API key" in refused.error) == (1, True)
    made = tokenmill("keys", "create", "--root", "root", "--label", "for tests", "--expires-in", "90d",
                      "--requests-per-minute", 60, "--tokens-per-minute", 9_000, "--running-requests", 4,
                      "--running-rows", 16, "--running-jobs", 2,
                      "--stored-bytes", 1_000, "--stored-files", 5)  # fmt: skip
    assert re.fullmatch(r"tm-[0-9a-f]{16}-[0-9a-f]{64}\n", made.out)
    (listed,) = json.loads(tokenmill("keys", "list", "--root", "root", "--json").out)
    assert (listed["label"], listed["scopes"], listed["revoked"]) == (
        "for tests",
        ["files", "batches", "inference"],
        False,
    )
    assert listed["limits"] == {
        "requests_per_minute": 60, "tokens_per_minute": 9_000, "running_requests": 4, "running_rows": 16,
        "running_jobs": 2, "stored_bytes": 1_000, "stored_files": 5,
    }  # fmt: skip
    assert made.out[20:40] not in str(listed)
    assert tokenmill("keys", "revoke", listed["id"], "--root", "root").code == 0
    assert "revoked" in tokenmill("keys", "list", "--root", "root").out
    assert "there is no key" in tokenmill("keys", "revoke", "../../x", "--root", "root").error
    assert "scopes are files" in tokenmill("keys", "create", "--root", "root", "--scope", "all").error
