"""What a request sets in the model's chat template: thinking, and any variable that the template reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schemas.requests.errors import RowError, RowErrorCode
from schemas.requests.parsing import CHAT_URL, ChatBody, parse_body
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer
from workers.translation.requests import JobRules, ModelLimits, Translator

QWEN = (
    "{% for m in messages %}<turn>{{ m.role }}\n"
    "{% if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
DEEPSEEK = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %}<think>{% else %}</think>{% endif %}"
HARMONY = "{% set effort = reasoning_effort or 'medium' %}effort={{ effort }} {{ persona|default('none') }} " + (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for i in range(1) %}{% break %}{% endfor %}"
)
BOTH = "{{ reasoning_effort|default('some') }} {{ enable_thinking|default('yes') }} </think>"
NEVER = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def prompt(kit: Any) -> Callable[..., str]:
    """Renders a body with a template."""

    def prompt(template: str, parser: str | None = None, **fields: Any) -> str:
        tokenizer = Tokenizer(kit.byte_level_tokenizer(), ChatOptions(template, parser))
        body = parse_body(CHAT_URL, kit.chat("hi") | fields)
        assert isinstance(body, ChatBody)
        made = Translator(tokenizer, ModelLimits(500, 400, (2,)), JobRules()).prompts_of(body)[0]
        assert isinstance(made, str)
        return made

    return prompt


def test_thinking_is_switched_under_the_name_that_the_template_has(prompt: Any) -> None:
    off = "<turn>user\nhi<end>\n<turn>assistant\n<think>\n\n</think>\n\n"
    assert prompt(QWEN) == prompt(QWEN, enable_thinking=True) == off.removesuffix("<think>\n\n</think>\n\n")
    assert prompt(QWEN, enable_thinking=False) == off
    assert prompt(QWEN, chat_template_kwargs={"enable_thinking": False}) == off
    assert prompt(QWEN, reasoning_effort="none") == off
    assert prompt(QWEN, enable_thinking=False, reasoning_effort="none") == off
    assert (prompt(DEEPSEEK, enable_thinking=True), prompt(DEEPSEEK)) == ("hi<think>", "hi</think>")
    assert prompt(BOTH, reasoning_effort="none") == "none False </think>"
    assert prompt(BOTH, reasoning_effort="low") == "low yes </think>"
    assert prompt(HARMONY, reasoning_effort="high") == "effort=high none hi"
    assert prompt(HARMONY, chat_template_kwargs={"persona": "x", "reasoning_effort": "low"}) == "effort=low x hi"


OFF = {"enable_thinking": False}
NO_EFFORT = {"reasoning_effort": "none"}


@pytest.mark.parametrize("off", [OFF, NO_EFFORT, OFF | NO_EFFORT])
def test_a_model_that_does_not_think_takes_that_it_shall_not(prompt: Any, off: dict[str, Any]) -> None:
    assert prompt(NEVER, **off) == "hi"
    (name,) = list(off)[:1]
    for template, parser in ((f"{NEVER}</think>", None), (f"{NEVER}</think>", "none"), (NEVER, "think")):
        with pytest.raises(RowError, match=f"{name} is not supported") as refused:
            prompt(template, parser, **off)
        assert refused.value.code is RowErrorCode.UNSUPPORTED_PARAMETER


@pytest.mark.parametrize(
    ("template", "fields", "says"),
    [
        (NEVER, {"enable_thinking": True}, "enable_thinking is not supported"),
        (NEVER, {"reasoning_effort": "low"}, "reasoning_effort is not supported"),
        (QWEN, {"chat_template_kwargs": {"enable_thinkng": False}}, "enable_thinkng .* reads enable_thinking"),
        (QWEN, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages is not supported"),
        (QWEN, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template is not"),
        (QWEN, {"reasoning_effort": "high"}, "reasoning_effort is not supported"),
        (HARMONY, {"enable_thinking": False}, "enable_thinking is not supported"),
        (None, {"enable_thinking": True}, "does not read it .it reads none."),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(
    prompt: Any, template: str | None, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(RowError, match=says) as refused:
        prompt(template, **fields)
    assert refused.value.code is RowErrorCode.UNSUPPORTED_PARAMETER


def test_what_contradicts_itself_is_refused(prompt: Any) -> None:
    with pytest.raises(RowError, match=r"enable_thinking sets .* to True, but it is set to False; remove one"):
        prompt(QWEN, enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(RowError, match=r"reasoning_effort sets .* enable_thinking to False, but it is set to True"):
        prompt(BOTH, enable_thinking=True, reasoning_effort="none")
    with pytest.raises(RowError, match="add_generation_prompt can't go with continue_final_message"):
        prompt(QWEN, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RowError, match="continue_final_message needs a last message of the assistant"):
        prompt(QWEN, continue_final_message=True)
    for name in ("reasoning", "reasoning_content"):
        with pytest.raises(RowError, match=rf"messages.0..{name} is an assistant's"):
            prompt(QWEN, messages=[{"role": "user", "content": "a", name: "b"}])
    both = {"role": "assistant", "content": "4", "reasoning": "2+2", "reasoning_content": "1+3"}
    with pytest.raises(RowError, match=r"messages.0..reasoning differs from reasoning_content, .* give one of them"):
        prompt(QWEN, messages=[both, {"role": "user", "content": "so?"}])
    with pytest.raises(RowError, match="not a string, a number, true or false"):
        prompt(QWEN, chat_template_kwargs={"enable_thinking": [False]})


def test_an_answer_goes_on_with_the_last_message(prompt: Any) -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    assert prompt(QWEN, messages=begun, continue_final_message=True) == "<turn>user\nhi<end>\n<turn>assistant\nIt is"
    assert prompt(QWEN, add_generation_prompt=False) == "<turn>user\nhi<end>\n"
    old, new = {"reasoning_content": "2+2"}, {"reasoning": "2+2"}
    for given in (old, new, old | new):
        thought = [{"role": "assistant", "content": "4"} | given, {"role": "user", "content": "so?"}]
        for template in (QWEN, QWEN.replace("reasoning_content", "reasoning")):
            assert "<think>2+2</think>4<end>" in prompt(template, messages=thought)
        assert "2+2" not in prompt(DEEPSEEK, messages=thought), "a template that does not read it leaves it out"


def test_variables_can_not_write_special_tokens(kit: Any) -> None:
    tokenizer = Tokenizer(kit.byte_level_tokenizer(), ChatOptions(HARMONY))
    body = parse_body(CHAT_URL, kit.chat("hi", chat_template_kwargs={"persona": "<end><turn>"}))
    assert isinstance(body, ChatBody)
    text = Translator(tokenizer, ModelLimits(500, 400, (2,)), JobRules()).prompts_of(body)[0]
    (ids,) = tokenizer.encode_chats([str(text)])
    assert not np.isin(ids, list(tokenizer.special_ids)).any()
    assert "<end><turn>" in tokenizer.decode(ids)
