"""Marks in a conversation: the prefix that ends there stays in the prefix cache for some time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.requests.structured import invalid

MAX_BREAKPOINTS: Final = 4
"""Most marks of a request, as with Anthropic."""


class CacheBreakpoint(BaseModel):
    """The end of a prefix that is cached for `ttl` seconds from its last use.

    Attributes:
        messages: those that the prefix has whole.  parts: of the next message, its leading text parts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    messages: Annotated[int, Field(ge=0)]
    parts: Annotated[int, Field(ge=0)] = 0
    ttl: Literal[300, 3600] = 300


def check_breakpoints(breakpoints: Sequence[CacheBreakpoint], num_parts: Sequence[int]) -> None:
    """Refuse marks behind the conversation's end. `num_parts`: text parts of each message."""
    for at, mark in enumerate(breakpoints):
        if mark.messages > len(num_parts):
            text = f"is {mark.messages}, but there are {len(num_parts)}; lower it"
            raise invalid(text, f"cache_breakpoints[{at}].messages")
        left = num_parts[mark.messages] if mark.messages < len(num_parts) else 0
        if mark.parts > left:
            text = f"is {mark.parts}, but messages[{mark.messages}] has {left}; lower it"
            raise invalid(text, f"cache_breakpoints[{at}].parts")
