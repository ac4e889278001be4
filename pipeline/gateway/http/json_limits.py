"""How much a JSON text holds, found out before it is parsed.

A parser keeps the interpreter's lock from beginning to end, so while it makes a million lists no stream goes on, in
whatever thread it works. A text's length says little: three bytes make a list. So what a text would be made into is
counted first, window by window, each by calls that take a few milliseconds at most.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from pipeline.gateway.http.errors import ApiError, bad_request

MOST_VALUES: Final = 350_000
"""In lists and objects: more than `max_embedding_tokens` numbers."""
MOST_PLACES: Final = 50_000
"""Lists, objects, and keys of objects, together: they take a parser ten times as long as numbers."""

_WINDOW: Final = 64 << 10
_MOST_QUOTES: Final = 2 * (MOST_VALUES + MOST_PLACES)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEPS: Final = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))


def check_bounds(data: bytes, max_depth: int) -> None:
    """Raises `ApiError` for JSON that nests brackets deeper than `max_depth` (400), or holds more than `MOST_VALUES` or
    `MOST_PLACES` (413). What is no JSON is judged up to where it isn't any more."""
    rest, inside = b"", 0  # of an escape that the window before begins; whether it ends inside a string
    depth = values = places = quotes = 0
    for start in range(0, len(data), _WINDOW):
        window = (rest + data[start : start + _WINDOW]).replace(b"\\\\", b"").replace(b'\\"', b"")
        rest = b"\\" if window.endswith(b"\\") else b""
        window = window.removesuffix(rest)
        here = window.count(b'"')
        quotes += here
        if quotes > _MOST_QUOTES:
            raise _too_much()
        outside = b"".join(window.split(b'"')[inside::2])
        inside = (inside + here) % 2
        values += outside.count(b",")
        places += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        if values > MOST_VALUES or places > MOST_PLACES:
            raise _too_much()
        levels = list(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=depth))
        if max(levels) > max_depth:
            raise bad_request(f"the body nests brackets deeper than {max_depth}; flatten it", code="invalid_json")
        depth = levels[-1]
        if depth < 0:
            return


def _too_much() -> ApiError:
    message = f"the body holds more than {MOST_VALUES:,} values, or {MOST_PLACES:,} lists, objects and keys; send less"
    return ApiError(413, "body_too_large", message)
