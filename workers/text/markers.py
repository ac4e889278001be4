"""Markers in a text: strings with a meaning for the chat template, such as `<think>` or `<tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Collection


def cut_at(text: str, spellings: Collection[str]) -> list[str]:
    """Split the text so that each occurrence of one of `spellings` is a piece."""
    if not spellings:
        return [text]
    pattern = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
    return [piece for piece in re.split(f"({pattern})", text) if piece]


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may begin `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
