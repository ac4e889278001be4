"""Where a conversation's marked prefixes end in its prompt, with templates that write it in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import CHAT_URL, ChatBody, parse_body
from tests.workers.structured.tool_templates import HERMES
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import JobRules, ModelLimits, RowHints, Translator

STRICT = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' and loop.index0 <= 1 %}"
    "{% for t in tools or [] %}{{ t.function.name }}HOW{% endfor %}{% endif %}"
    "{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
).replace("HOW", 'as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>;')
"""Tools stand in the first user's message, and there must be one."""

FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}{% endfor %}"
)
"""Only the last message's reasoning is shown."""

TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
SAID = [
    {"role": "system", "content": [{"type": "text", "text": "rules"}, {"type": "text", "text": "date"}]},
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "more"},
]


@pytest.fixture
def retained(kit: Any) -> Callable[..., list[tuple[str, float]]]:
    """The texts of a conversation's retained prefixes, and their seconds."""

    def retained(template: str, *places: dict[str, int], **fields: Any) -> list[tuple[str, float]]:
        tokenizer = Tokenizer(kit.byte_level_tokenizer(), ChatOptions(template))
        given = {"model": "m", "messages": SAID, "cache_breakpoints": list(places), **fields}
        body = parse_body(CHAT_URL, given)
        assert isinstance(body, ChatBody)
        translator = Translator(tokenizer, ModelLimits(5_000, 400, (2,)), JobRules(default_max_tokens=8))
        prompts = tokenizer.encode_chats([str(text) for text in translator.prompts_of(body)])
        request = translator.request("r", body, prompts, RowHints(0))
        return [(tokenizer.decode(prompts[0][:end]), seconds) for end, seconds in request.retain]

    return retained


def test_a_prefix_ends_behind_its_messages_or_their_parts(retained: Any) -> None:
    system = "[system]rules\ndate[end]"
    places = {"messages": 0, "parts": 1}, {"messages": 1, "ttl": 3_600}, {"messages": 4}
    assert retained(STRICT, *places) == [
        ("[system]rules", 300),
        (f"{system}[user]", 3_600),
        (f"{system}[user]question[end][assistant]answer[end][user]more[end]", 300),
    ]
    assert retained(STRICT) == []


def test_tools_are_within_a_prefix_wherever_the_template_writes_them(retained: Any) -> None:
    (found,) = retained(STRICT, {"messages": 1}, tools=[TOOL])
    assert found == (
        '[system]rules\ndate[end][user]lookupas <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>;',
        300,
    )
    (found,) = retained(HERMES, {"messages": 0}, tools=[TOOL])
    assert '"lookup"' in found[0]
    assert found[0].endswith("</tool_call>\nsystem\n")


def test_a_prefix_is_what_the_whole_prompt_begins_with(retained: Any) -> None:
    for name in ("reasoning", "reasoning_content"):
        said = [*SAID[:2], {"role": "assistant", "content": "answer", name: "hm"}, SAID[3]]
        (found,) = retained(FORGETFUL, {"messages": 3}, messages=said)
        assert found[0] == "[system]rules\ndate[user]question[assistant]answer[user]"
    whole = retained(STRICT, {"messages": 3}, messages=SAID[:3], continue_final_message=True)
    assert whole == [("[system]rules\ndate[end][user]question[end][assistant]answer", 300)]


def test_a_mark_where_the_template_can_not_end_retains_nothing_and_fails_nothing(retained: Any) -> None:
    filled = STRICT.replace("not messages", "messages | selectattr('content', 'equalto', '') | list or not messages")
    assert [text for text, _ in retained(filled, {"messages": 0}, {"messages": 4})] == [
        "[system]rules\ndate[end][user]question[end][assistant]answer[end][user]more[end]"
    ]


def test_a_prompt_that_is_cut_retains_nothing(retained: Any) -> None:
    assert retained(STRICT, {"messages": 1}, truncate_prompt_tokens=20) == []


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"messages": 5}, r"cache_breakpoints\[0\].messages is 5, but there are 4; lower it"),
        ({"messages": 1, "parts": 2}, r"cache_breakpoints\[0\].parts is 2, but messages\[1\] has 1; lower it"),
        ({"messages": 4, "parts": 1}, r"cache_breakpoints\[0\].parts is 1, but messages\[4\] has 0; lower it"),
        ({"messages": 1, "ttl": 60}, r"cache_breakpoints\[0\].ttl is 60, but must be 300 or 3600"),
        ({"messages": -1}, r"cache_breakpoints\[0\].messages is -1, but must be 0 or more"),
        ({"messages": 1, "more": 1}, r"cache_breakpoints\[0\].more is not a parameter known here"),
    ],
)
def test_places_that_are_none_are_refused_by_name(place: dict[str, int], says: str) -> None:
    with pytest.raises(RowError, match=says) as caught:
        parse_body(CHAT_URL, {"model": "m", "messages": SAID, "cache_breakpoints": [place]})
    assert caught.value.code in (RowErrorCode.INVALID_REQUEST, RowErrorCode.UNSUPPORTED_PARAMETER)


def test_at_most_four_marks() -> None:
    with pytest.raises(RowError, match="cache_breakpoints"):
        parse_body(CHAT_URL, {"model": "m", "messages": SAID, "cache_breakpoints": [{"messages": 1}] * 5})
