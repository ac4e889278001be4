"""How models write tool calls: found out from a model's chat template.

The template shows a call as the model was trained to write it. A few forms are known here; each is a marker that opens
a call (or a list of calls), and JSON. A marker may be one special token, one ordinary token or plain text, as the
tokenizer has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from workers.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
        opening: begins a call, or a list of them; empty: the answer's first brace does.
        closing: ends it.  between: stands between two calls.
        arguments: the key of a call's arguments, beside `name`.
        listed: one opening, and all calls in one JSON list.
        most: calls of an answer; None: any number.
        short_ids: a call's id has nine characters, letters and digits.
    """

    name: str
    opening: str
    closing: str = ""
    between: str = ""
    arguments: str = "arguments"
    listed: bool = False
    most: int | None = None
    short_ids: bool = False


HERMES: Final = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n")
"""NousResearch's Hermes, Qwen 2.5 and 3 and others: {"name": …, "arguments": …} between two tags."""

LLAMA: Final = ToolFormat("llama", "", arguments="parameters", most=1)
"""Llama 3.1 to 3.3: the answer is {"name": …, "parameters": …}; its template knows no second call."""

LLAMAS_WORDS: Final = '{"name": function name, "parameters": dictionary of argument name and its value}'
"""How Meta's templates explain it to the model."""

MISTRAL: Final = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, short_ids=True)
"""Mistral up to the seventh version of its tokenizer: a list behind a special token. Its templates want ids of nine."""

BARRED: Final = ToolFormat("barred", "<|tool_call|>", listed=True)
"""Granite 3 and Phi-4-mini: a list behind <|tool_call|>, which the latter closes."""

OTHERS: Final = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]", "<|tool▁call", "<|channel|>", "<tool_call_begin>")
"""Parts of forms that look like one of the above, or like nothing known here."""


def takes_tools(template: str) -> bool:
    """Whether a chat template (jinja) looks at the tools that it is given."""
    return any(re.search(r"\btools\b", code) for code in re.findall(r"{[{%](.*?)[%}]}", template, re.DOTALL))


def find_tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes calls; None: in no form known here, or not at all."""
    template = tokenizer.tool_template
    if template is None or not takes_tools(template) or any(part in template for part in OTHERS):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|tool_call|>" in template:
        return replace(BARRED, closing="<|/tool_call|>") if "<|/tool_call|>" in template else BARRED
    if "<tool_call>" in template and "arguments" in template and re.search(r"""name\\?["']\s*:""", template):
        return HERMES
    return LLAMA if LLAMAS_WORDS in template else None


KNOWN: Final = "Hermes and Qwen (<tool_call>), Llama 3, Mistral ([TOOL_CALLS]), Granite and Phi (<|tool_call|>)"
