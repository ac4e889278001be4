"""What a request's prompt begins with, as a chain of hashes: equal hash, equal prefix.

The chain is cut where messages end (the first few) and, from there on, after 1, 2, 4, 8, … times `min_bytes`, so it is
short for any prompt, and two prompts that share a prefix share the chain up to the last cut inside it. Hashes differ
between models and urls; they only steer the order of work, so 63 bits are plenty.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from schemas.requests.requests import Body, ChatBody, ChatMessage, CompletionBody, EmbeddingBody

HASHED_MESSAGES = 4
MASK = 2**63 - 1


class PrefixChain(NamedTuple):
    """Hashes of ever longer prefixes, and how many bytes each covers."""

    hashes: tuple[int, ...]
    sizes: tuple[int, ...]


def prompt_bytes(body: Body) -> tuple[bytes, tuple[int, ...]]:
    """The prompt as bytes that begin alike when the prompts do, and the offsets where its first messages end. Of texts
    to be embedded there is nothing to compare: they share nothing."""
    if isinstance(body, EmbeddingBody):
        return b"", ()
    if isinstance(body, CompletionBody):
        if isinstance(body.prompt, str):
            return body.prompt.encode(), ()
        return array("i", body.prompt).tobytes(), ()
    pieces = [f"{message.role}\x00{message_text(message)}\x01".encode() for message in body.messages]
    if tools := tools_text(body):
        pieces.insert(0, f"{tools}\x01".encode())  # templates write them first
    ends = tuple(accumulate(len(piece) for piece in pieces[:HASHED_MESSAGES]))
    return b"".join(pieces), ends


def message_text(message: ChatMessage) -> str:
    """What a message says, and what it calls."""
    calls = "".join(call.model_dump_json() for call in message.tool_calls)
    return message.text + calls


def tools_text(body: ChatBody) -> str:
    """The tools that the prompt describes; empty: none."""
    return "\n".join(tool.model_dump_json(exclude_none=True) for tool in body.offered_tools)


def prefix_chain(prompt: bytes, ends: tuple[int, ...], key: bytes, min_bytes: int) -> PrefixChain:
    """The chain of a prompt; `key` (at most 64 bytes) keeps models and urls apart. Empty for a prompt shorter than
    `min_bytes`."""
    if len(prompt) < min_bytes:
        return PrefixChain((), ())
    sizes: list[int] = []
    begin = 0
    for end in (*ends, len(prompt)):
        step = min_bytes
        while begin + step < end:
            sizes.append(begin + step)
            step *= 2
        if end >= min_bytes and end > begin:
            sizes.append(end)
        begin = end
    state = blake2b(digest_size=8, key=key)
    hashes: list[int] = []
    start = 0
    for size in sizes:
        state.update(prompt[start:size])
        hashes.append(int.from_bytes(state.digest(), "little") & MASK)
        start = size
    return PrefixChain(tuple(hashes), tuple(sizes))
