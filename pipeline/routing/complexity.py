"""The complexity of a request: a score from 0 to 100 that needs no model.

| points | for |
|--|--|
| 0 to 30 | the prompt's length: one for each 100 tokens |
| 20 | code: a fenced block, or two lines that look like code |
| 20 | maths: LaTeX, or two mathematical signs |
| 0 to 10 | a conversation: two for each user message after the first |
| 10 | tools that the model may call |
| 10 | a form that the answer must have (a JSON schema, a choice, a grammar) |

The score is a rule of thumb: it says how much a request contains, not whether a model can answer it. Code and maths are
searched in the user's messages.
"""

from __future__ import annotations

import re
from typing import Final

from pipeline.routing.requests import RoutedRequest

MAX_CHARS: Final = 16_384
"""Characters in which marks are searched: the last ones."""

_CODE_LINE = re.compile(
    r"^[ \t]*+(?:(?:def|class|fn|func|function|impl|struct|import|from|#include|package|using|public|private|static|"
    r"const|let|var|return|SELECT|INSERT|UPDATE|CREATE)\b.{0,200}[(){};:,=*<>\"]|[^\n]{1,200}[{};]|</?[a-zA-Z][^>\n]{0,100}>)"
    r"[ \t]*$",
    re.MULTILINE,
)
_LATEX = re.compile(
    r"\\(?:frac|sum|int|sqrt|begin|lim|prod|cdot|left|infty|partial|mathbb)\b|\$[^$\n]{0,99}[\\^_=][^$\n]{0,99}\$"
)
_SIGN = re.compile(r"[∑∏∫√∂∇∞≤≥≠≈∈∀∃±]|\b[a-z0-9)]\s{0,2}\^\s{0,2}[a-z0-9(]|\b[a-z]\s{0,2}=\s{0,2}[-0-9(]")


def complexity(request: RoutedRequest) -> int:
    """The request's score."""
    text = request.user_text[-MAX_CHARS:]
    score = min(30, request.prompt_tokens // 100)
    score += 20 * has_code(text)
    score += 20 * has_maths(text)
    score += min(10, 2 * max(0, request.user_turns - 1))
    score += 10 * request.has_tools
    score += 10 * request.has_schema
    return score


def has_code(text: str) -> bool:
    """Whether the text contains marks of code."""
    return "```" in text or sum(1 for _ in _CODE_LINE.finditer(text)) >= 2


def has_maths(text: str) -> bool:
    """Whether the text contains marks of mathematics."""
    return _LATEX.search(text) is not None or sum(1 for _ in _SIGN.finditer(text)) >= 2
