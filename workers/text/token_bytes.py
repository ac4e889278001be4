"""The bytes of token ids, and how a decoder joins them to text.

This module joins the texts of byte-level and byte-fallback vocabularies byte by byte. The byte-fallback decoder of the
tokenizers library replaces every byte of a whole run of byte tokens by U+FFFD if the run as a whole is not UTF-8,
so an answer that ends within a character would lose all characters of that run.

Bytes are decoded as by `bytes.decode("utf-8", "replace")`: each maximal subpart of an ill-formed sequence becomes
one U+FFFD (The Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts"; also the WHATWG's decoder).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes that it adds to a running text; none for special tokens and unused ids.

    Entries are added on first use, so a later lookup costs no call.
    """

    def __init__(
        self,
        spelling_of: Callable[[int], str | None],
        added: Mapping[int, str],
        special: Collection[int],
        byte_level: bool,
    ) -> None:
        """`spelling_of`: a token's spelling in the vocabulary; `added`: texts of the tokens that are matched whole;
        `special`: ids of the tokens that decoding leaves out."""
        super().__init__(dict.fromkeys(special, b""))
        self._spelling_of = spelling_of
        self._added = added
        self._byte_of = _byte_alphabet() if byte_level else None

    def __missing__(self, token_id: int) -> bytes:
        raw = self[token_id] = self._read(token_id)
        return raw

    def _read(self, token_id: int) -> bytes:
        if self._byte_of is None:
            token = self._added.get(token_id) or self._spelling_of(token_id) or ""
            if match := BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            return token.replace("\u2581", " ").encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._spelling_of(token_id) or ""
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:  # the library treats such a token as plain text
            return token.encode()


def dropped_blanks(decoder: Mapping[str, Any]) -> int | None:
    """Number of blanks that a decoder (as in tokenizer.json) drops at the beginning of a text; None: it does more than
    to join its tokens' bytes."""
    if decoder.get("type") == "ByteLevel":
        return 0
    parts = decoder.get("decoders", [])
    kinds = [part.get("type") for part in parts]
    if "ByteFallback" not in kinds:
        return None
    dropped = 0
    for at, part in enumerate(parts):
        match part:
            case {"type": "ByteFallback" | "Fuse"} | {
                "type": "Replace", "pattern": {"String": "\u2581"}, "content": " "
            }:  # fmt: skip
                pass
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if "Fuse" in kinds[:at]:
                dropped += int(start)
            case _:
                return None
    return dropped


def without_blanks(raw: bytes, max_blanks: int) -> bytes:
    """`raw` without its leading blanks, of which `max_blanks` are removed at most."""
    return raw[min(max_blanks, len(raw) - len(raw.lstrip(b" "))) :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones represent themselves, the others follow from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
