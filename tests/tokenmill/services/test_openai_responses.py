"""The Responses API by OpenAI's own client against `tokenmill serve`, and as lines of `tokenmill run`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, DefaultHttpxClient, OpenAI
from pydantic import BaseModel

from tests.pipeline.gateway.witness import Witness
from tests.tokenmill.command_processes import Processes, as_jsonl, ended
from tests.waiting import HANG_SECONDS
from tests.workers.structured import tool_templates

pytestmark = pytest.mark.slow

RESPONSES = "/v1/responses"
ROWS = 6


class Order(BaseModel):
    """The model of a structured answer."""

    colour: Literal["red", "green", "blue"]
    gift: bool


class Count(BaseModel):
    """Counts."""

    n: Literal[1, 2, 3]


COUNT: Any = openai.pydantic_function_tool(Count, name="count")
TOOL: Any = {"type": "function", **COUNT["function"]}


@dataclass
class Served:
    url: str
    client: OpenAI
    engine: tuple[object, ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    template = folder / "tools.jinja"
    template.write_text(tool_templates.HERMES.replace("{{ t | tojson }}", "{{ t.function.name }}"))
    engine = ("--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", 1, "--chat-template", template)
    with closing(Processes(folder)) as processes:
        number = processes.start("-m", "tokenmill", "serve", "--data", folder / "data", "--port", 0, *engine)
        url = processes.url(number)
        witness = Witness(httpx2.get(f"{url}/openapi.json", timeout=HANG_SECONDS).json())

        def judge(answer: httpx2.Response) -> None:
            body = None if "event-stream" in answer.headers.get("content-type", "") else answer.read()
            answer.headers.pop("content-encoding", None)  # the client has decoded the body
            witness.look(answer.request.method, answer.request.url.path, answer.status_code, answer.headers, body)

        seen = DefaultHttpxClient(event_hooks={"response": [judge]})
        yield Served(url, OpenAI(base_url=f"{url}/v1", timeout=HANG_SECONDS, api_key="x", http_client=seen), engine)
        assert not witness.untrue, "\n".join(witness.untrue)


def ask(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": f"number {number}", "max_output_tokens": 8, "temperature": 0, **more}


def test_a_response_is_the_answer_of_the_same_chat(served: Served) -> None:
    messages: Any = [{"role": "system", "content": "count"}, {"role": "user", "content": "number 1"}]
    chat = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    made = served.client.responses.create(**ask(instructions="count"))
    assert made.output_text == chat.choices[0].message.content
    assert made.id.startswith("resp_")
    assert (made.status, made.incomplete_details and made.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert made.usage is not None
    assert chat.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert served.client.responses.create(**ask()).usage != made.usage, "without instructions the prompt is shorter"


def test_extensions_of_sampling_do_what_they_do_in_a_chat(served: Served) -> None:
    messages: Any = [{"role": "user", "content": "number 1"}]
    chat: Any = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    plain = served.client.chat.completions.create(**chat, extra_body={"return_token_ids": True}).choices[0].model_dump()
    extensions: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": ["red", "green"]}},
        {"logit_bias": {"65": 100}},
        {"allowed_token_ids": [65, 66, 67]},
        {"stop_token_ids": [plain["token_ids"][2]]},
    ]
    for extension in extensions:
        wanted = served.client.chat.completions.create(**chat, extra_body=extension)
        made = served.client.responses.create(**ask(), extra_body=extension)
        assert made.output_text == wanted.choices[0].message.content != plain["message"]["content"], extension


def test_a_stream_is_the_same_response(served: Served) -> None:
    whole = served.client.responses.create(**ask())
    events = list(served.client.responses.create(**ask(), stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert (last.response.output_text, last.response.status) == (whole.output_text, whole.status)
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_many_at_once_by_the_async_client(served: Served) -> None:
    async def one(client: AsyncOpenAI, number: int) -> str:
        if number % 2:
            return (await client.responses.create(**ask())).output_text
        stream = await client.responses.create(**ask(), stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def all_of_them() -> set[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", timeout=HANG_SECONDS, api_key="x", max_retries=0) as client:
            return set(await asyncio.gather(*(one(client, number) for number in range(8))))

    assert len(asyncio.run(all_of_them())) == 1


def test_an_answer_is_read_as_a_model_of_pydantic(served: Served) -> None:
    parsed = served.client.responses.parse(**ask(max_output_tokens=150), text_format=Order)
    assert isinstance(parsed.output_parsed, Order)
    with served.client.responses.stream(**ask(max_output_tokens=150), text_format=Order) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_function_is_called_and_its_output_given_back(served: Served) -> None:
    request = ask(max_output_tokens=200, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=1)
    for seed in range(3):
        more: Any = {"extra_body": {"seed": seed}}
        made = served.client.responses.parse(**{**request, "tools": [COUNT]}, **more)
        with served.client.responses.stream(**{**request, "tools": [COUNT]}, **more) as stream:
            streamed = stream.get_final_response()
        (call,) = made.output
        (again,) = streamed.output
        assert call.type == again.type == "function_call"
        assert isinstance(call.parsed_arguments, Count)
        assert (again.name, again.arguments) == (call.name, call.arguments)
        assert made.status == streamed.status == "completed"
    items: Any = [
        {"role": "user", "content": "number 1"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    result = served.client.responses.create(**ask(input=items))
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        {"role": "user", "content": "number 1"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "2"},
    ]
    chat = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    assert result.output_text == chat.choices[0].message.content
    assert result.usage is not None
    assert chat.usage is not None
    assert result.usage.input_tokens == chat.usage.prompt_tokens
    forced = served.client.responses.create(**request | {"tool_choice": {"type": "function", "name": "count"}})
    assert [item.name for item in forced.output if item.type == "function_call"] == ["count"]


def test_a_conversation_goes_on_with_the_output_as_input(served: Served) -> None:
    """The next response has the same prompt as the chat with the same messages."""
    first = served.client.responses.create(**ask())
    items: Any = [{"role": "user", "content": "number 1"}, *first.output, {"role": "user", "content": "and then?"}]
    second = served.client.responses.create(**ask(input=items))
    messages: Any = [
        {"role": "user", "content": "number 1"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then?"},
    ]
    chat = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


TOO_LONG = "and max_output_tokens 5000 need 5018, but .* lower max_output_tokens$"


def test_each_error_is_the_clients_own_class_and_names_the_field(served: Served) -> None:
    client = served.client.with_options(max_retries=0)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(**ask() | {"model": "gpt-9"})
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError, match=TOO_LONG) as long:
        client.responses.create(**ask(max_output_tokens=5_000))
    assert long.value.code == "context_length_exceeded"
    for field, value in (
        ("store", True), ("background", True), ("previous_response_id", "resp_1"), ("truncation", "auto"),
        ("tools", [{"type": "web_search"}]), ("include", ["file_search_call.results"]),
        ("reasoning", {"effort": "low"}),
    ):  # fmt: skip
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**ask(), **{field: value}, stream=stream)
            assert refused.value.code == "unsupported_parameter"
            assert (refused.value.param or "").startswith(field)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


@pytest.mark.exhaustive
def test_a_batch_gives_the_responses_of_interactive_requests(
    served: Served, write_lines: Callable[..., Path], tokenmill: Any, results: Any, tmp_path: Path
) -> None:
    """The same lines by HTTP and by `tokenmill run`."""
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": RESPONSES, "body": ask(n % 4)} for n in range(ROWS)
    ]  # two of them twice
    tools = ask(0, tools=[TOOL], tool_choice="required", max_output_tokens=200)
    lines.append({"custom_id": "call", "method": "POST", "url": RESPONSES, "body": tools})
    client = served.client
    file = client.files.create(file=("requests.jsonl", as_jsonl(lines)), purpose="batch")
    batch: Any = {"input_file_id": file.id, "endpoint": RESPONSES, "completion_window": "24h"}
    done = ended(client, client.batches.create(**batch).id)
    assert (done.status, done.error_file_id) == ("completed", None)
    output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    found = {line["custom_id"]: line["response"]["body"] for line in output}
    for number in range(ROWS):
        text = found[f"r{number}"]["output"][0]["content"][0]["text"]
        assert text == client.responses.create(**ask(number % 4)).output_text
    assert len({body["id"] for body in found.values()}) == len(lines), "copies have ids of their own"
    assert {item["type"] for item in found["call"]["output"]} == {"function_call"}
    computed = [found[name] for name in ("r0", "r1", "r2", "r3", "call")]
    assert done.usage.output_tokens == sum(body["usage"]["output_tokens"] for body in computed)

    bad = [{**lines[0], "custom_id": "bad", "body": ask(store=True)}, {**lines[0], "custom_id": "long"}]
    bad[1]["body"] = ask(max_output_tokens=5_000)
    out = tmp_path / "out"
    assert tokenmill("run", write_lines(*lines, *bad), "--output", out, *served.engine).code == 0
    rows = {row["custom_id"]: row for row in results(out)}
    for name, body in found.items():
        assert json.loads(rows[name]["response"])["output"][0].get("content") == body["output"][0].get("content"), name
    assert rows["r1"]["text"] == found["r1"]["output"][0]["content"][0]["text"]
    assert (rows["bad"]["error_code"], rows["long"]["error_code"]) == (
        "unsupported_parameter",
        "context_length_exceeded",
    )
    assert re.search(TOO_LONG, rows["long"]["error_message"])
