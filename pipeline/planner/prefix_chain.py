"""The prefixes of a request's prompt as a chain of hashes: equal hash, equal prefix.

The chain is cut at the ends of the first messages and, from there on, after 1, 2, 4, 8, … times `min_bytes`. So it is
short for any prompt, and two prompts that share a prefix share the chain up to the last cut inside it. Hashes differ
between models and urls; they only determine the order of work, so 63 bits suffice.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from schemas.requests.parsing import Body, ChatBody, ChatMessage, ClassifyBody, CompletionBody

HASHED_MESSAGES = 4
MASK = 2**63 - 1


class PrefixChain(NamedTuple):
    """Hashes of increasingly long prefixes, and the bytes that each covers."""

    hashes: tuple[int, ...]
    sizes: tuple[int, ...]


def prompt_bytes(body: Body) -> tuple[bytes, tuple[int, ...]]:
    """The prompt as bytes, which share a prefix when the prompts do, and the end offsets of its first messages. Of
    several prompts it is the first one. Texts for an encoder have no bytes: they share no prefix."""
    if isinstance(body, ClassifyBody) and body.choices:
        body = body.prompt_body
    if not isinstance(body, ChatBody | CompletionBody):
        return b"", ()
    if isinstance(body, CompletionBody):
        prompt = body.prompts[0]
        return prompt.encode() if isinstance(prompt, str) else array("i", prompt).tobytes(), ()
    pieces = [f"{message.role}\x00{message_text(message)}\x01".encode() for message in body.messages]
    if tools := tools_text(body):
        pieces.insert(0, f"{tools}\x01".encode())  # templates write them first
    ends = tuple(accumulate(len(piece) for piece in pieces[:HASHED_MESSAGES]))
    return b"".join(pieces), ends


def message_text(message: ChatMessage) -> str:
    """A message's text and tool calls."""
    calls = "".join(call.model_dump_json() for call in message.tool_calls)
    return message.text + calls


def tools_text(body: ChatBody) -> str:
    """The descriptions of the prompt's tools; empty: none."""
    return "\n".join(tool.model_dump_json(exclude_none=True) for tool in body.offered_tools)


def prefix_chain(prompt: bytes, ends: tuple[int, ...], key: bytes, min_bytes: int) -> PrefixChain:
    """The chain of a prompt; `key` (at most 64 bytes) makes the hashes of models and urls differ. Empty for a prompt
    shorter than `min_bytes`."""
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
