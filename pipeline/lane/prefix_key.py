"""The key of a request's prefix: requests with equal keys probably share blocks of a worker's prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final

import orjson

from schemas.requests.parsing import CHAT_URL, COMPLETIONS_URL
from schemas.workers.lane import LaneRequest

MIN_PREFIX_BYTES: Final = 256
"""Two blocks of 32 tokens, at four bytes a token: to compute less again takes a worker no time worth waiting for."""

MAX_PREFIX_BYTES: Final = 1_024
"""Of a prompt without a long system prompt. Prompts that part after these bytes have them in common; prompts that part
before share too little. An unbounded key would separate all prompts."""

KEY_BYTES: Final = 16
_TOKEN_BYTES: Final = 4
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


def prefix_key(request: LaneRequest) -> bytes | None:
    """The key of the request's prefix; None: it has none that is worth a way to one worker.

    Caches are salted by tenant, so a key holds the tenant; workers have one model each, so it holds the model.
    """
    prefix = _prefix(request.url, request.body)
    if len(prefix) < MIN_PREFIX_BYTES:
        return None
    state = blake2b(digest_size=KEY_BYTES)
    for part in (request.tenant.encode(), request.model.encode(), prefix):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def _prefix(url: str, body: Mapping[str, Any]) -> bytes:
    if url == CHAT_URL:
        return _chat_prefix(body)
    if url == COMPLETIONS_URL:
        return _completion_prefix(body.get("prompt"))
    return b""  # encoders and tokenizers have no prefix cache


def _chat_prefix(body: Mapping[str, Any]) -> bytes:
    """A system prompt with the tools is the whole key of a first turn, where it is long enough: what follows differs
    from chat to chat, and would part those that share it. A short one says little about the chat, so the first message
    behind it counts too.

    Of a later turn, which has an answer, that message always counts, however short it is: the workers have the system
    prompt by then, and one of them the conversation. Later messages never count: all turns are to find the cache of the
    turn before."""
    messages: Sequence[Mapping[str, Any]] = body.get("messages") or ()
    system = list(takewhile(lambda message: message.get("role") in _SYSTEM_ROLES, messages))
    tools = body.get("tools")
    shared = b"".join(orjson.dumps(part) for part in ((tools, *system) if tools else system))
    is_later_turn = any(message.get("role") == "assistant" for message in messages)
    if len(system) == len(messages) or (len(shared) >= MIN_PREFIX_BYTES and not is_later_turn):
        return shared
    first = orjson.dumps(messages[len(system)])[:MAX_PREFIX_BYTES]
    if not is_later_turn:
        return (shared + first)[:MAX_PREFIX_BYTES]
    is_long = len(shared) + len(first) >= MIN_PREFIX_BYTES or len(orjson.dumps(messages)) >= MIN_PREFIX_BYTES
    return (shared + first).ljust(MIN_PREFIX_BYTES) if is_long else b""


def _completion_prefix(prompt: Any) -> bytes:
    """Of several prompts the first one."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:MAX_PREFIX_BYTES].encode(errors="surrogatepass")[:MAX_PREFIX_BYTES]
    tokens = (prompt or ())[: MAX_PREFIX_BYTES // _TOKEN_BYTES]
    return b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
