"""Which requests share a prefix."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.lane.prefix_key import MAX_PREFIX_BYTES, MIN_PREFIX_BYTES, prefix_key
from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL
from schemas.requests.tokenizing import TOKENIZE_URL
from schemas.workers.lane import LaneRequest

LONG = "You answer for the shop. " * 20
SHORT = "Be brief."


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def key(*messages: dict[str, Any], tenant: str = "t", model: str = "m", **more: Any) -> bytes | None:
    return prefix_key(LaneRequest("r", model, {"messages": list(messages), **more}, CHAT_URL, tenant=tenant))


def completion_key(prompt: Any) -> bytes | None:
    return prefix_key(LaneRequest("r", "m", {"prompt": prompt}, COMPLETIONS_URL))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chats_with_one_long_system_prompt_share_it_whatever_follows(role: str) -> None:
    first = key(message(role, LONG), message("user", "one"))
    assert first is not None
    assert first == key(message(role, LONG), message("user", "two" * 5_000))
    assert first == key(message(role, LONG))
    assert first != key(message(role, LONG + "."), message("user", "one"))


def test_tenants_and_models_share_no_prefix() -> None:
    chat = message("system", LONG)
    assert len({key(chat), key(chat, tenant="u"), key(chat, model="n"), key(chat, tenant="tm", model="")}) == 4


def test_all_turns_of_a_conversation_share_its_first_message() -> None:
    question = "What is a block? " * 30
    first = key(message("system", SHORT), message("user", question))
    assert first is not None
    later = [message("assistant", "That." * 500), message("user", "Why?")]
    assert first == key(message("system", SHORT), message("user", question), *later)
    assert first != key(message("system", SHORT), message("user", "And " + question), *later)
    assert first != key(message("user", question), *later)


def test_conversations_behind_one_long_system_prompt_have_keys_of_their_own() -> None:
    def turn(question: str, *later: str) -> bytes | None:
        roles = ("assistant", "user")
        messages = [message(roles[number % 2], text) for number, text in enumerate(later)]
        return key(message("system", LONG), message("user", question), *messages)

    first, second = turn("Where is it?", "There.", "Why?"), turn("Who is it?", "She.", "Why?")
    assert None not in (first, second)
    assert first != second
    assert first == turn("Where is it?", "There.", "Why?", "So.", "And then?")
    assert turn("Where is it?") == turn("Who is it?") != first


def test_a_long_conversation_with_a_short_beginning_has_a_key() -> None:
    begin, answer = message("user", "Hi"), message("assistant", "Hello! " * 50)
    assert key(begin) is None
    assert key(begin, message("assistant", "Hello!"), message("user", "Bye")) is None
    later = key(begin, answer, message("user", "Why?"))
    assert later is not None
    assert later == key(begin, answer, message("user", "Why?"), message("assistant", "So."), message("user", "Oh"))
    assert later != key(message("user", "Ho"), answer, message("user", "Why?"))


def test_prompts_that_part_late_share_their_beginning() -> None:
    document = "A document of many words. " * 100
    assert len(document) > MAX_PREFIX_BYTES
    assert key(message("user", document + "Who?")) == key(message("user", document + "When?")) is not None
    assert completion_key(document + "Who?") == completion_key(document + "When?") is not None
    ids = list(range(2_000))
    assert completion_key([*ids, 1]) == completion_key([*ids, 2]) != completion_key([7, *ids])
    assert completion_key([ids, [5]]) == completion_key(ids) is not None
    assert completion_key([document, "x"]) == completion_key(document)


def test_tools_belong_to_the_prefix() -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "Finds. " * 50}}]
    other = [{"type": "function", "function": {"name": "seek", "description": "Finds. " * 50}}]
    with_tools = key(message("user", "one"), tools=tools)
    assert with_tools is not None
    assert with_tools == key(message("user", "two"), tools=tools) != key(message("user", "one"), tools=other)


@pytest.mark.parametrize(
    "request_",
    [
        LaneRequest("r", "m", {"messages": [message("user", "hello")]}, CHAT_URL),
        LaneRequest("r", "m", {"messages": [message("system", SHORT), message("user", "hello")]}, CHAT_URL),
        LaneRequest("r", "m", {"messages": []}, CHAT_URL),
        LaneRequest("r", "m", {}, CHAT_URL),
        LaneRequest("r", "m", {"prompt": "x" * (MIN_PREFIX_BYTES - 1)}, COMPLETIONS_URL),
        LaneRequest("r", "m", {"prompt": [1] * 63}, COMPLETIONS_URL),
        LaneRequest("r", "m", {"prompt": []}, COMPLETIONS_URL),
        LaneRequest("r", "m", {}, COMPLETIONS_URL),
        LaneRequest("r", "m", {"input": LONG}, EMBEDDINGS_URL),
        LaneRequest("r", "m", {"messages": [message("system", LONG)]}, TOKENIZE_URL),
    ],
)
def test_a_prefix_shorter_than_two_blocks_and_requests_without_one_have_no_key(request_: LaneRequest) -> None:
    assert prefix_key(request_) is None


def test_content_of_several_parts_is_a_prefix_too() -> None:
    parts = [{"type": "text", "text": LONG}]
    assert key(message("system", parts), message("user", "a")) == key(message("system", parts)) is not None
