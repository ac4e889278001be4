"""Detects a model's format of tool calls from its chat template.

The template shows a call as the model was trained to write it. The known formats are a marker that opens a call (or a
list of calls), followed by JSON. Depending on the tokenizer, a marker is one special token, one ordinary token or plain
text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from workers.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        opening: begins a call, or a list of calls; empty: the answer's first brace does.
        closing: ends it.  between: separates two calls.
        arguments: the key of a call's arguments; its name has the key `name`.
        listed: all calls are in one JSON list after one opening.
        max_calls: calls of an answer; None: any number.
        short_ids: a call's id has nine characters, letters and digits.
    """

    name: str
    opening: str
    closing: str = ""
    between: str = ""
    arguments: str = "arguments"
    listed: bool = False
    max_calls: int | None = None
    short_ids: bool = False


HERMES: Final = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n")
"""NousResearch's Hermes, Qwen 2.5 and 3 and others: {"name": …, "arguments": …} between two tags."""

LLAMA: Final = ToolFormat("llama", "", arguments="parameters", max_calls=1)
"""Llama 3.1 to 3.3: the answer is {"name": …, "parameters": …}; its template supports no second call."""

LLAMA_INSTRUCTION: Final = '{"name": function name, "parameters": dictionary of argument name and its value}'
"""The instruction in Meta's templates that explains the format to the model."""

MISTRAL: Final = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, short_ids=True)
"""Mistral up to the seventh version of its tokenizer: a list behind a special token. Its templates require ids of nine
characters."""

BARRED: Final = ToolFormat("barred", "<|tool_call|>", listed=True)
"""Granite 3 and Phi-4-mini: a list after <|tool_call|>; Phi-4-mini also closes it."""

UNKNOWN_MARKERS: Final = (
    "<function=",
    "<arg_key>",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool▁call",
    "<|channel|>",
    "<tool_call_begin>",
)
"""Markers of unknown formats, some of which resemble a known one."""


def takes_tools(template: str) -> bool:
    """Whether a chat template (jinja) reads its `tools`."""
    return any(re.search(r"\btools\b", code) for code in re.findall(r"{[{%](.*?)[%}]}", template, re.DOTALL))


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The model's format of tool calls; None: it is unknown, or the model has none."""
    template = tokenizer.tool_template
    if template is None or not takes_tools(template) or any(part in template for part in UNKNOWN_MARKERS):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|tool_call|>" in template:
        return replace(BARRED, closing="<|/tool_call|>") if "<|/tool_call|>" in template else BARRED
    if "<tool_call>" in template and "arguments" in template and re.search(r"""name\\?["']\s*:""", template):
        return HERMES
    return LLAMA if LLAMA_INSTRUCTION in template else None


KNOWN_FORMATS: Final = "Hermes and Qwen (<tool_call>), Llama 3, Mistral ([TOOL_CALLS]), Granite and Phi (<|tool_call|>)"
