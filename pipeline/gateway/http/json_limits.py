"""Limits of the number of JSON values, lists and objects in a text, checked before it is parsed.

A JSON parser holds the GIL for the whole parse, so while it creates a million lists all streams stall, even when it
runs in another thread. The length of a text is no bound: three bytes are enough for a list. So the values are counted
before the parse, window by window, with calls that take a few milliseconds each.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from pipeline.gateway.http.errors import ApiError, bad_request

MAX_VALUES: Final = 350_000
"""The bound of values in lists and objects; it is larger than `max_embedding_tokens`."""
MAX_CONTAINERS_AND_KEYS: Final = 50_000
"""The bound of lists, objects, and keys of objects together: each takes a parser ten times as long as a number."""

_WINDOW: Final = 64 << 10
_MAX_QUOTES: Final = 2 * (MAX_VALUES + MAX_CONTAINERS_AND_KEYS)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))


def check_bounds(data: bytes, max_depth: int) -> None:
    """Raises `ApiError` for JSON that nests brackets deeper than `max_depth` (400), or holds more than `MAX_VALUES` or
    `MAX_CONTAINERS_AND_KEYS` (413). Invalid JSON is checked up to its first error."""
    rest, inside = b"", 0  # the start of an escape at the previous window's end; whether that ends inside a string
    depth = values = containers = quotes = 0
    for start in range(0, len(data), _WINDOW):
        window = (rest + data[start : start + _WINDOW]).replace(b"\\\\", b"").replace(b'\\"', b"")
        rest = b"\\" if window.endswith(b"\\") else b""
        window = window.removesuffix(rest)
        window_quotes = window.count(b'"')
        quotes += window_quotes
        if quotes > _MAX_QUOTES:
            raise _too_much()
        outside = b"".join(window.split(b'"')[inside::2])
        inside = (inside + window_quotes) % 2
        values += outside.count(b",")
        containers += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        if values > MAX_VALUES or containers > MAX_CONTAINERS_AND_KEYS:
            raise _too_much()
        levels = list(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=depth))
        if max(levels) > max_depth:
            raise bad_request(f"the body nests brackets deeper than {max_depth}; flatten it", code="invalid_json")
        depth = levels[-1]
        if depth < 0:
            return


def _too_much() -> ApiError:
    most = MAX_CONTAINERS_AND_KEYS
    message = f"the body holds more than {MAX_VALUES:,} values, or {most:,} lists, objects and keys; send less"
    return ApiError(413, "body_too_large", message)
