"""All that OpenAI's own client does, with nothing changed but `base_url` and `api_key`, against an installation of
processes: a gateway, a dispatcher, a worker with a model for text, and one with a model for embeddings.

The tests run in the order of the file on one installation: the last test stops the gateway. Each answer is also
validated against the gateway's OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, DefaultHttpxClient, OpenAI
from pydantic import BaseModel

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.gateway.http.api_keys import ApiKeys, Scope
from pipeline.ports import World
from schemas.requests.limits import RateLimits
from tests.pipeline.gateway.witness import Witness
from tests.servers.redis import RedisServer
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS, wait_for
from tests.workers.structured import tool_templates

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
ROWS = 24
CALLERS = 60
"""Fewer than a tenant may have rows under way at one worker."""
STREAMS = 8
LONG = 3_000
"""Rows that would take a minute or more: four are computed at once."""


class Order(BaseModel):
    """The model of a structured answer."""

    colour: Literal["red", "green", "blue"]
    count: Literal[1, 2, 3]
    gift: bool


class Count(BaseModel):
    """Counts."""

    n: Literal[1, 2, 3]


@dataclass
class InstallationUnderTest:
    """The gateway, which is the first of the processes, and a client for it."""

    processes: Processes
    url: str
    client: OpenAI
    keys: dict[str, str]
    witness: Witness

    def with_key(self, name: str) -> OpenAI:
        return self.client.with_options(api_key=self.keys[name], max_retries=0)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, embedding_model: Path, redis_server: RedisServer
) -> Iterator[InstallationUnderTest]:
    folder = tmp_path_factory.mktemp("served")
    template = folder / "tools.jinja"
    template.write_text(tool_templates.HERMES.replace("{{ t | tojson }}", "{{ t.function.name }}"))
    keys = make_keys(folder / "root")
    processes = Processes(
        folder, TOKENMILL_REDIS_URL=redis_server.url, TOKENMILL_ROOT=str(folder / "root"),
        TOKENMILL_GATEWAY__MAX_UPLOAD_BYTES="2000000", TOKENMILL_GATEWAY__DRAIN_SECONDS=str(HANG_SECONDS),
        TOKENMILL_CHECKPOINT_SECONDS="0.2",
    )  # fmt: skip
    command = "-m", "tokenmill"
    with closing(processes):
        number = processes.start(*command, "gateway", "--port", 0)
        worker = (*command, "worker", "--threads", 1, "--dtype", "float32")
        processes.start(*worker, "--model", f"tiny={model_folder}", "--max-num-seqs", 4, "--chat-template", template)
        processes.start(*worker, "--model", f"embeds={embedding_model}")
        processes.start(*command, "dispatcher")
        url = processes.url(number)
        witness = Witness(httpx2.get(f"{url}/openapi.json", timeout=HANG_SECONDS).json())
        seen = DefaultHttpxClient(event_hooks={"response": [lambda answer: judge(witness, answer)]})
        client = OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key=keys["all"], http_client=seen)
        wait_for(lambda: len(client.models.list().data) == 2, "the models are not served")
        yield InstallationUnderTest(processes, url, client, keys, witness)
        assert not witness.untrue, "\n".join(witness.untrue)
        for process in processes.running:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(HANG_SECONDS) for process in processes.running] == [0] * 4


def make_keys(root: Path) -> dict[str, str]:
    limits = RateLimits(requests_per_minute=1)
    with FolderStore(root) as store:
        made = ApiKeys(World(store, SystemClock(), SystemRandomness(), store.scratch))
        return {
            "all": made.create("acme", tuple(Scope))[1],
            "slow": made.create("acme", tuple(Scope), limits=limits)[1],
            "single": made.create("acme", tuple(Scope), limits=RateLimits(running_requests=1))[1],
            "files": made.create("acme", (Scope.FILES,))[1],
        }


def judge(witness: Witness, answer: httpx2.Response) -> None:
    request = answer.request
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    body = None if streamed else answer.read()
    answer.headers.pop("content-encoding", None)  # the client has decoded the body
    witness.look(request.method, request.url.path, answer.status_code, answer.headers, body)


def chat(number: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"number {number}"}
    return {"model": "tiny", "messages": [message], "max_tokens": 8, "temperature": 0, **more}


def lines(count: int, **more: Any) -> bytes:
    return as_jsonl(
        [{"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": chat(n, **more)} for n in range(count)]
    )


@pytest.fixture(scope="module")
def answers(served: InstallationUnderTest) -> dict[str, str]:
    """A batch from upload to download: the text of each row."""
    client = served.client
    file = client.files.create(file=("requests.jsonl", lines(ROWS)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"project": "show"}
    )
    assert (batch.object, batch.input_file_id, batch.endpoint) == ("batch", file.id, CHAT)
    assert (batch.completion_window, batch.expires_at) == ("24h", batch.created_at + 86_400)
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata, batch.error_file_id) == ("completed", {"project": "show"}, None)
    times = [batch.created_at, batch.in_progress_at or 0, batch.finalizing_at or 0, batch.completed_at or 0]
    assert times == sorted(times), "each in its turn"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (ROWS, ROWS, 0)
    assert batch.output_file_id is not None
    output = client.files.content(batch.output_file_id)
    lines_out = [json.loads(line) for line in output.text.splitlines()]
    assert {(line["response"]["status_code"], line["error"]) for line in lines_out} == {(200, None)}
    found = {line["custom_id"]: line["response"]["body"] for line in lines_out}
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in found.values())
    stored = client.files.retrieve(batch.output_file_id)
    assert (stored.purpose, stored.bytes) == ("batch_output", len(output.content))
    return {name: body["choices"][0]["message"]["content"] for name, body in found.items()}


def test_a_batch_gives_the_answers_of_interactive_requests(
    served: InstallationUnderTest, answers: dict[str, str]
) -> None:
    assert sorted(answers) == sorted(f"r{number}" for number in range(ROWS))
    whole = served.client.chat.completions.create(**chat(3))
    assert whole.choices[0].message.content == answers["r3"]
    stream = served.client.chat.completions.create(**chat(3), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answers["r3"]
    assert chunks[-1].usage == whole.usage


def test_many_callers_at_once_by_the_async_client(served: InstallationUnderTest, answers: dict[str, str]) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        if number % 2:
            answer = await client.chat.completions.create(**chat(number % ROWS))
            return answer.choices[0].message.content or ""
        stream = await client.chat.completions.create(**chat(number % ROWS), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{served.url}/v1", timeout=HANG_SECONDS, api_key=served.keys["all"], max_retries=0
        ) as client:
            names = [model.id async for model in client.models.list()]
            assert sorted(names) == ["embeds", "tiny"]
            batches = [batch.id async for batch in client.batches.list(limit=1)]
            assert len(batches) == 1
            files = [file.purpose async for file in client.files.list(limit=1)]
            assert files == ["batch_output", "batch"], "the newest first"
            made = await client.embeddings.create(model="embeds", input=["a river"])
            assert len(made.data[0].embedding) == 32
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve("job-none")
            return await asyncio.gather(*(one(client, number) for number in range(CALLERS)))

    assert asyncio.run(all_of_them()) == [answers[f"r{number % ROWS}"] for number in range(CALLERS)]


def test_files_are_listed_page_by_page_and_deleted(served: InstallationUnderTest) -> None:
    client = served.client
    made = [client.files.create(file=(f"{n}.jsonl", lines(1)), purpose="batch") for n in range(5)]
    ids = [file.id for file in made]
    assert [file.id for file in client.files.list(limit=2)][:5] == ids[::-1]
    oldest = [file.id for file in client.files.list(limit=2, order="asc")]
    assert oldest[-5:] == ids
    assert client.files.retrieve(ids[0]) == made[0]
    assert client.files.content(ids[0]).content == lines(1)
    page = client.files.list(limit=2, order="asc", after=ids[0])
    assert ([file.id for file in page.data], page.has_more) == (ids[1:3], True)
    page = page.get_next_page()
    assert ([file.id for file in page.data], page.has_more) == (ids[3:], False)
    for name in ids:
        assert client.files.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(name)
    assert not set(ids) & {file.id for file in client.files.list()}


def test_an_expired_batch_keeps_its_finished_rows(served: InstallationUnderTest) -> None:
    """On a machine that has much else to do nothing may be finished in a few seconds: then it gets more time."""
    client = served.client
    file = client.files.create(file=("long.jsonl", lines(LONG, max_tokens=60, ignore_eos=True)), purpose="batch")
    for seconds in (3, 12, 48):
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=f"{seconds}s")
        assert batch.expires_at == batch.created_at + seconds
        with pytest.raises(openai.ConflictError) as conflict:
            client.files.delete(file.id)
        assert conflict.value.code == "file_in_use"
        batch = ended(client, batch.id)
        assert (batch.status, batch.completed_at) == ("expired", None)
        assert batch.expired_at is not None
        assert batch.expired_at >= batch.created_at + seconds
        assert batch.error_file_id is not None
        if batch.output_file_id is not None:
            break
    assert batch.output_file_id is not None, "finished rows have an output file"
    answered = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    missing = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in answered} == {60}
    assert {line["response"]["status_code"] for line in answered} == {200}
    assert {line["error"]["code"] for line in missing} == {"batch_expired"}
    assert sorted(line["custom_id"] for line in answered + missing) == sorted(f"r{n}" for n in range(LONG))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(answered), len(missing))
    assert client.batches.list(limit=1).data[0] == batch
    with pytest.raises(openai.ConflictError) as over:
        client.batches.cancel(batch.id)
    assert over.value.code == "batch_ended"


def test_a_batch_is_cancelled(served: InstallationUnderTest) -> None:
    client = served.client
    file = client.files.create(file=("long.jsonl", lines(LONG, max_tokens=60, ignore_eos=True)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it does not begin")
    cancelling = client.batches.cancel(batch.id)
    assert (cancelling.status, cancelling.cancelled_at) == ("cancelling", None)
    assert cancelling.cancelling_at is not None
    batch = ended(client, batch.id)
    assert (batch.status, batch.cancelling_at) == ("cancelled", cancelling.cancelling_at)
    assert batch.cancelled_at is not None
    assert batch.error_file_id is not None
    missing = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {line["error"]["code"] for line in missing} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert batch.request_counts.failed == len(missing) > 0
    assert batch.request_counts.completed + len(missing) == LONG
    assert client.files.delete(file.id).deleted


def test_batches_are_listed_page_by_page(served: InstallationUnderTest, answers: dict[str, str]) -> None:
    client = served.client
    newest = [one.id for one in client.batches.list(limit=1)]
    assert len(newest) >= 3
    assert newest == sorted(newest), "ids sort the newest first"
    first = client.batches.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == (newest[:2], True)
    rest = client.batches.list(limit=100, after=newest[0])
    assert ([one.id for one in rest.data], rest.has_more) == (newest[1:], False)
    oldest = client.batches.list(limit=2, extra_query={"order": "asc"})
    assert [one.id for one in oldest] == newest[::-1]


def test_a_batch_with_an_invalid_line_fails_and_names_it(served: InstallationUnderTest) -> None:
    client = served.client
    file = client.files.create(file=("bad.jsonl", lines(2) + b'{"custom_id": 1}\n'), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert [(one.line, one.code) for one in batch.errors.data or []] == [(3, "invalid_request")]


def test_an_answer_is_read_as_a_model_of_pydantic(served: InstallationUnderTest) -> None:
    parsed = served.client.chat.completions.parse(**chat(1, max_tokens=150), response_format=Order)
    assert isinstance(parsed.choices[0].message.parsed, Order)
    with served.client.chat.completions.stream(**chat(1, max_tokens=150), response_format=Order) as stream:
        last = stream.get_final_completion()
    assert last.choices[0].message.parsed == parsed.choices[0].message.parsed


TOOLS = [openai.pydantic_function_tool(Count, name=name) for name in ("count", "add")]


def test_tools_are_called_whole_and_streamed(served: InstallationUnderTest) -> None:
    """The model has no end token, so some answers are cut off; both must have the same finish reason."""
    request = chat(1, max_tokens=200, tools=TOOLS, tool_choice="required", temperature=1, seed=4, n=8)
    whole = served.client.chat.completions.create(**request)
    answers = {choice.index: (choice.finish_reason, called(choice.message.tool_calls)) for choice in whole.choices}
    assert max(len(calls) for _, calls in answers.values()) > 1, "several at once"
    made = [call for reason, calls in answers.values() if reason == "tool_calls" for call in calls]
    assert {name for name, _ in made} == {"count", "add"}
    assert all(Count.model_validate_json(arguments) for _, arguments in made)
    streamed = read_calls(served.client.chat.completions.create(**request, stream=True))
    assert streamed.keys() == answers.keys()
    for index, (reason, calls) in streamed.items():
        assert reason == answers[index][0]
        if reason == "tool_calls":
            assert calls == answers[index][1]


def test_one_tool_is_called_and_its_arguments_are_read_as_a_model_of_pydantic(served: InstallationUnderTest) -> None:
    request = chat(1, max_tokens=200, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1)
    for seed in range(4):
        whole = served.client.chat.completions.parse(**request, seed=seed).choices[0]
        with served.client.chat.completions.stream(**request, seed=seed) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert whole.finish_reason == streamed.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Count)
        assert called(streamed.message.tool_calls) == called(whole.message.tool_calls)
    named = {"type": "function", "function": {"name": "add"}}
    forced = served.client.chat.completions.create(**{**request, "tool_choice": named})
    assert [name for name, _ in called(forced.choices[0].message.tool_calls)] == ["add"]
    none = served.client.chat.completions.create(**{**request, "tool_choice": "none", "max_tokens": 4})
    assert not none.choices[0].message.tool_calls


def called(calls: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or []]


def read_calls(stream: Any) -> dict[int, tuple[str | None, list[tuple[str, str]]]]:
    """Finish reason and tool calls of each choice, joined from the deltas as OpenAI specifies."""
    reasons: dict[int, str | None] = {}
    calls: dict[int, list[tuple[str, str]]] = {}
    ids: set[str] = set()
    for chunk in stream:
        for choice in chunk.choices:
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            mine = calls.setdefault(choice.index, [])
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(mine):
                    assert piece.id not in ids, "each call has an id of its own"
                    ids.add(piece.id)
                    mine.append((piece.function.name, ""))
                else:
                    assert (piece.id, piece.function.name) == (None, None), "said once"
                name, arguments = mine[piece.index]
                mine[piece.index] = name, arguments + (piece.function.arguments or "")
    return {index: (reasons[index], calls[index]) for index in calls}


def test_a_result_of_a_tool_is_taken(served: InstallationUnderTest) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "user", "content": "how many?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    answer = served.client.chat.completions.create(**{**chat(1), "messages": messages}, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)


def test_texts_are_embedded_concurrently(served: InstallationUnderTest) -> None:
    texts = ["a river", "a stream"]
    made = served.client.embeddings.create(model="embeds", input=texts, encoding_format="float")
    assert [(one.index, len(one.embedding)) for one in made.data] == [(0, 32), (1, 32)]
    assert made.usage.prompt_tokens == made.usage.total_tokens >= 4
    packed = served.client.embeddings.create(model="embeds", input=texts)  # as base64, which the client reads
    for one, other in zip(packed.data, made.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    short = served.client.embeddings.create(model="embeds", input=texts[0], dimensions=8)
    assert len(short.data[0].embedding) == 8


def test_texts_are_gone_on_with(served: InstallationUnderTest) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "a river", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    text = served.client.completions.create(**request)
    assert text.usage is not None
    chunks = list(served.client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text.choices[0].text
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage) == (text.choices[0].finish_reason, text.usage)
    echoed = served.client.completions.create(**request, echo=True)
    assert echoed.choices[0].text == "a river" + text.choices[0].text


def test_several_prompts_are_gone_on_with(served: InstallationUnderTest) -> None:
    prompts = ["a river", "the sea", "a hill"]
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0.8, "seed": 4, "n": 2, "logprobs": 1}
    whole = served.client.completions.create(**request, prompt=prompts)
    alone = [served.client.completions.create(**request, prompt=prompt) for prompt in prompts]
    texts = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage is not None
    assert whole.usage.total_tokens == sum(answer.usage.total_tokens for answer in alone if answer.usage is not None)
    streamed = dict.fromkeys(range(6), "")
    ends = 0
    options: Any = {"include_usage": True}
    for chunk in served.client.completions.create(**request, prompt=prompts, stream=True, stream_options=options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends += choice.finish_reason is not None
    assert list(streamed.values()) == texts
    assert ends == 6
    assert chunk.usage == whole.usage
    prompt_ids: dict[int, list[int]] = {}
    more: Any = {"stream": True, "extra_body": {"return_token_ids": True}}
    for chunk in served.client.completions.create(**request, prompt=prompts, **more):
        for choice in chunk.choices:
            if (ids := getattr(choice, "prompt_token_ids", None)) is not None:
                assert prompt_ids.setdefault(choice.index, ids) is ids, "each choice has them once"
    assert [prompt_ids[number] for number in (0, 2, 4)] == [prompt_ids[number] for number in (1, 3, 5)]
    assert len({tuple(ids) for ids in prompt_ids.values()}) == 3
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\] of "):
        served.client.completions.create(model="tiny", prompt=["a", "far too long " * 500, "b"])


def test_an_evaluation_harness_scores_continuations_in_batches(served: InstallationUnderTest) -> None:
    """The requests of lm-eval's `local-completions`: lists of token ids, echoed with the log-probability of each."""
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7], [9, 8, 7, 6]]
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    scored = served.client.completions.create(**request, prompt=prompts, seed=1234)
    for prompt, choice in zip(prompts, sorted(scored.choices, key=lambda choice: choice.index), strict=True):
        alone = served.client.completions.create(**request, prompt=prompt).choices[0].logprobs
        assert choice.logprobs is not None
        assert alone is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 1
        assert choice.logprobs.token_logprobs[1:] == pytest.approx((alone.token_logprobs or [])[1:], abs=1e-4)
        assert choice.logprobs.tokens == alone.tokens
    ending: Any = {"stop_token_ids": [7]}
    ended = served.client.completions.create(**request, prompt=prompts, logit_bias={"7": 100}, extra_body=ending)
    for choice, whole in zip(ended.choices, scored.choices, strict=True):
        assert (choice.finish_reason, whole.finish_reason) == ("stop", "length")
        assert choice.logprobs is not None
        assert whole.logprobs is not None
        numbers = choice.logprobs.token_logprobs or []
        assert len(numbers) == len(whole.logprobs.token_logprobs or []), "the end token is the last, which is dropped"
        assert numbers[-1] is not None
        assert numbers[1:-1] == pytest.approx((whole.logprobs.token_logprobs or [])[1:-1], abs=1e-4)
    extra: Any = {"prompt_logprobs": 1, "truncate_prompt_tokens": 2}
    cut: Any = served.client.completions.create(model="tiny", prompt=prompts, max_tokens=1, extra_body=extra)
    assert [len(choice.prompt_logprobs) for choice in cut.choices] == [2, 2, 2]
    assert (cut.usage.prompt_tokens, cut.usage.prompt_tokens_details.truncated_tokens) == (6, 6)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not supported in a stream"):
        served.client.completions.create(model="tiny", prompt="x", stream=True, extra_body=extra)


def test_each_error_is_the_clients_own_class(served: InstallationUnderTest) -> None:
    client = served.client.with_options(max_retries=0)
    with pytest.raises(openai.AuthenticationError) as wrong:
        client.with_options(api_key="tm-wrong").models.list()
    assert (wrong.value.status_code, wrong.value.code) == (401, "invalid_api_key")
    with pytest.raises(openai.PermissionDeniedError) as lacking:
        served.with_key("files").batches.list()
    assert (lacking.value.status_code, lacking.value.code) == (403, "missing_scope")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**chat(1), "model": "gpt-9"})
    assert (unknown.value.status_code, unknown.value.code, unknown.value.param) == (404, "model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**chat(1, temperature=9))
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**chat(1, max_tokens=5_000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("a.jsonl", b"x" * 2_200_000), purpose="batch")
    assert (large.value.status_code, large.value.code) == (413, "file_too_large")
    same: Any = {"purpose": "batch", "extra_headers": {"Idempotency-Key": "the same"}}
    client.files.create(file=("a.jsonl", lines(1)), **same)
    with pytest.raises(openai.ConflictError) as reused:
        client.files.create(file=("a.jsonl", lines(2)), **same)
    assert (reused.value.status_code, reused.value.code) == (409, "idempotency_key_reused")
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**chat(1, max_tokens=400), timeout=0.01)
    for error in (wrong, lacking, unknown, bad, long, large, reused):
        assert (error.value.request_id or "").startswith("req-")


def test_too_many_requests_are_refused_with_a_retry_after(served: InstallationUnderTest) -> None:
    client = served.with_key("slow")
    answer = client.models.with_raw_response.list()
    assert answer.headers["x-ratelimit-limit-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as limited:
        client.models.list()
    assert (limited.value.status_code, limited.value.code) == (429, "rate_limit_exceeded")
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 120


def test_a_caller_with_one_slot_is_never_refused_one_request_after_another(served: InstallationUnderTest) -> None:
    client = served.with_key("single")
    for number in range(6):
        whole = client.chat.completions.create(**chat(number))
        stream = client.chat.completions.create(**chat(number), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**chat(number, max_tokens=5_000))


def test_a_stopping_gateway_refuses_new_requests_and_ends_its_streams(served: InstallationUnderTest) -> None:
    client = served.client.with_options(max_retries=0)
    ends: list[str | None] = []

    def read() -> None:
        more: Any = {"stream": True, "extra_body": {"ignore_eos": True}}
        stream = client.chat.completions.create(**chat(1, max_tokens=240), **more)
        ends.append([chunk.choices[0].finish_reason for chunk in stream][-1])

    readers = [threading.Thread(target=read) for _ in range(STREAMS)]
    for reader in readers:
        reader.start()
    lane = {"Authorization": f"Bearer {served.keys['all']}"}
    status = f"{served.url}/v1/status"
    wait_for(
        lambda: httpx2.get(status, headers=lane, timeout=HANG_SECONDS).json()["lane"]["open"] == STREAMS,
        "they don't begin",
    )
    process = served.processes.running[0]
    process.send_signal(signal.SIGTERM)

    def refusal() -> openai.APIStatusError | None:
        try:
            client.models.list()
        except openai.InternalServerError as error:
            return error
        return None

    refused = wait_for(refusal, "it takes requests")
    assert refused is not None
    assert (refused.status_code, refused.code) == (503, "draining")
    assert refused.response.headers["retry-after"] == "1"
    for reader in readers:
        reader.join(HANG_SECONDS)
    assert ends == ["length"] * STREAMS
    assert process.wait(HANG_SECONDS) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
