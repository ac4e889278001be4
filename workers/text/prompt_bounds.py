"""A lower bound of a text's tokens that needs no tokenizing: a prompt far beyond the context is refused at once, where
tokenizing it would take seconds.

Each token covers at most as much text as the longest token, so a text's size divided by it is the bound. This holds
only if every step of the tokenizer preserves the text. Steps that may drop any amount of it (a normalizer that strips,
words that become one unknown token) leave no bound; steps that join a limited number of characters into one weaken it.
Unknown steps leave no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers.models import BPE

BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))

IN_NO_TEXT: Final = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that UTF-8 never uses."""

JOINED_BY_COMPOSITION: Final = 4
"""Maximum number of characters that NFC and NFKC join into one: no canonical decomposition of Unicode is longer. A
character that they replace becomes at least one."""

KEEPS_CHARACTERS: Final = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
"""Normalizers that turn each character into at least one."""

KEEPS_TEXT: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that drop nothing."""


@dataclass(frozen=True, slots=True)
class PromptBound:
    """The text that the longest token covers.

    Attributes:
        longest: bytes of UTF-8, or characters.
        in_bytes: whether `longest` is bytes.
        unspelt: bytes that no token contains. They are left out of the ids, so they are not counted.
        blanks_count: false: tokens may cover any number of adjacent blanks, so blanks are not counted.
    """

    longest: int
    in_bytes: bool
    unspelt: bytes = b""
    blanks_count: bool = True

    def count_min_tokens(self, text: str) -> int:
        """A lower bound of the tokens in any encoding of the text."""
        counted = text if self.blanks_count else "".join(text.split())
        size = len(counted.encode().translate(None, self.unspelt)) if self.in_bytes else len(counted)
        return -(-size // self.longest)


def bound_of(backend: tokenizers.Tokenizer) -> PromptBound | None:
    """The bound of a tokenizer; None: it has none."""
    model = backend.model
    normalizers = list(_parts(component_state(backend.normalizer), "normalizers"))
    pre_tokenizers = list(_parts(component_state(backend.pre_tokenizer), "pretokenizers"))
    joined = _max_joined(normalizers)
    if joined is None or not all(map(_keeps_text, pre_tokenizers)) or not isinstance(model, BPE):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    in_bytes = byte_level and not normalizers
    unspelt = b""
    if byte_level:
        unspelt = bytes(byte for character, byte in byte_characters().items() if character not in vocabulary)
        if not in_bytes and not IN_NO_TEXT.issuperset(unspelt):
            return None
    elif not (model.byte_fallback and vocabulary.keys() >= BYTE_TOKENS):
        return None  # characters without a token are left out, or a run of any length is one unknown token
    added = backend.get_added_tokens_decoder().values()
    contents = [token.content for token in added]
    if backend.normalizer is not None:
        contents += list(map(backend.normalizer.normalize_str, contents))
    longest = max((len(content.encode() if byte_level else content) for content in contents), default=1)
    longest = max(longest, max(map(len, vocabulary), default=1)) * joined
    return PromptBound(longest, in_bytes, unspelt, not any(token.lstrip or token.rstrip for token in added))


def component_state(component: Any) -> dict[str, Any]:
    """A tokenizer component's settings, as in tokenizer.json."""
    state: dict[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return state


def _parts(component: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a component; a sequence is flattened."""
    if component and component["type"] == "Sequence":
        for part in component[name]:
            yield from _parts(part, name)
    elif component:
        yield component


def _max_joined(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Maximum number of characters that become one; None: any number."""
    joined = 1
    for part in normalizers:
        if part["type"] in ("NFC", "NFKC"):
            joined *= JOINED_BY_COMPOSITION
        elif part["type"] == "Replace" and "String" in part["pattern"] and part["content"]:
            joined *= max(1, -(-len(part["pattern"]["String"]) // len(part["content"])))
        elif part["type"] not in KEEPS_CHARACTERS:
            return None
    return joined


def _keeps_text(part: Mapping[str, Any]) -> bool:
    return part["type"] in KEEPS_TEXT or (
        part["type"] in ("Split", "Punctuation") and part.get("behavior", "Removed") != "Removed"
    )


def byte_characters() -> dict[str, int]:
    """The characters that represent the 256 bytes in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
