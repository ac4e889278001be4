"""Where the marked prefixes of a conversation end in its prompt.

A template may write a conversation in any order, so a mark's position is found by rendering the conversation cut there:
up to the mark both have the same tokens. Of the messages behind the mark the roles are kept, since templates refuse
conversations without a user, put the tools into the first user's message, or leave out reasoning before the last one's.
"""

from __future__ import annotations

import numpy as np

from schemas.requests.bodies import ChatBody
from schemas.requests.breakpoints import CacheBreakpoint
from schemas.requests.errors import RowError
from workers.text.tokenizer import TokenIds, Tokenizer
from workers.translation.rendering import rendered_chat


def retained_prefixes(body: ChatBody, prompt: TokenIds, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """The marked prefixes of the prompt, for `Request.retain`: (tokens, seconds). A mark at which the template refuses
    to end retains nothing: it doesn't change the answer, so it must not fail it."""
    cuts: list[str] = []
    seconds: list[float] = []
    for mark in body.cache_breakpoints:
        try:
            cuts.append(rendered_chat(_cut(body, mark), tokenizer))
        except RowError:
            continue
        seconds.append(mark.ttl)
    ends = [_common(prompt, cut) for cut in tokenizer.encode_chats(cuts)] if cuts else []
    return tuple((end, ttl) for end, ttl in zip(ends, seconds, strict=True) if end)


def _cut(body: ChatBody, mark: CacheBreakpoint) -> ChatBody:
    """The conversation up to the mark."""
    if mark.messages == len(body.messages):
        return body.model_copy(update={"add_generation_prompt": False})
    messages = list(body.messages[: mark.messages])
    for message in body.messages[mark.messages :]:
        update: dict[str, object] = {"content": "", "tool_calls": (), "reasoning": None, "reasoning_content": None}
        if mark.parts and len(messages) == mark.messages:
            content = message.content if isinstance(message.content, str) else (message.content or ())[: mark.parts]
            update = {"content": content, "tool_calls": ()}
        messages.append(message.model_copy(update=update))
    return body.model_copy(
        update={"messages": tuple(messages), "add_generation_prompt": False, "continue_final_message": False}
    )


def _common(one: TokenIds, other: TokenIds) -> int:
    """The number of leading tokens that both have."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if differing.size else length
