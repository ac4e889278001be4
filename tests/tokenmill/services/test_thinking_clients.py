"""Thoughts in the official clients of OpenAI and Anthropic, against `tokenmill serve` with a model that thinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from tests.tokenmill.command_processes import Processes
from tests.waiting import HANG_SECONDS
from tests.workers.structured import thinking_templates

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

BUDGET = 9


class Order(BaseModel):
    """The form of a structured answer."""

    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model_folder: Any) -> Iterator[str]:
    """A server whose model thinks for as many tokens as its default budget allows, unless it is switched off."""
    folder = tmp_path_factory.mktemp("thinking")
    template = folder / "thinks.jinja"
    template.write_text(thinking_templates.SWITCHED)
    processes = Processes(folder)
    with closing(processes):
        number = processes.start(
            "-m", "tokenmill", "serve", "--data", folder / "data", "--port", 0, "--threads", 1, "--dtype", "float32",
            "--model", f"tiny={model_folder}", "--chat-template", template, "--thinking-token-budget", BUDGET,
            "--speculate", "ngram",
        )  # fmt: skip
        yield processes.url(number)


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG_SECONDS)


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "seed": 3} | fields


def test_a_chat_has_its_thought_apart_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ask())
    message: Any = whole.choices[0].message
    assert message.reasoning_content
    assert message.reasoning == message.reasoning_content  # the names of newer and of older clients
    assert message.content
    assert "think>" not in message.reasoning_content + message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) <= BUDGET

    deltas: list[Any] = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**ask(stream=True)) if chunk.choices
    ]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == message.reasoning


def test_a_thought_is_switched_off_bounded_and_given_back(client: OpenAI) -> None:
    off: Any = client.chat.completions.create(**ask(extra_body={"enable_thinking": False})).choices[0].message
    assert off.reasoning_content is None
    none: Any = client.chat.completions.create(**ask(extra_body={"thinking_token_budget": 0})).choices[0].message
    assert none.reasoning_content is None
    thought = "the user greets"
    prompt_tokens = []
    for fields in ({}, {"reasoning_content": thought}, {"reasoning": thought}):
        before = {"role": "assistant", "content": "well", **fields}
        messages = [*ask()["messages"], before, {"role": "user", "content": "again"}]
        usage = client.chat.completions.create(**ask(messages=messages)).usage
        assert usage is not None
        prompt_tokens.append(usage.prompt_tokens)
    without, older, newer = prompt_tokens
    assert newer == older > without
    with pytest.raises(openai.BadRequestError, match="persona"):
        client.chat.completions.create(**ask(extra_body={"chat_template_kwargs": {"persona": "x"}}))


def test_a_parsed_answer_stands_behind_the_thought(client: OpenAI) -> None:
    message: Any = client.chat.completions.parse(**ask(response_format=Order)).choices[0].message
    assert message.parsed.colour in ("red", "green")
    assert message.reasoning_content
    response = client.responses.parse(model="tiny", input="Hello", text_format=Order, max_output_tokens=60)
    assert response.output_parsed is not None
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_responses_have_reasoning_items_whole_and_streamed(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 60, "temperature": 0}
    whole = client.responses.create(**fields)
    reasoning, message = whole.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= BUDGET
    events = list(client.responses.create(**fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == reasoning.content[0].text  # type: ignore[union-attr,index]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    # and the output is given back as input
    again = client.responses.create(
        **fields | {"input": [{"role": "user", "content": "Hello"}, *(item.to_dict() for item in whole.output)]}
    )
    assert again.output
    off = client.responses.create(**fields, reasoning={"effort": "none"})
    assert [item.type for item in off.output] == ["message"]


def test_messages_have_thinking_blocks_whole_and_streamed(url: str) -> None:
    client = Anthropic(base_url=url, api_key="none", timeout=HANG_SECONDS)
    fields: Any = {"model": "tiny", "max_tokens": 60, "extra_body": {"temperature": 0}}
    fields |= {"messages": [{"role": "user", "content": "Hello"}]}
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    content = [block.to_dict() for block in whole.content]
    messages = [*fields["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "again"}]
    assert client.messages.create(**fields | {"messages": messages}).usage.input_tokens > whole.usage.input_tokens
    off = client.messages.create(**fields, thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]
