"""The table of all attacks, in the order of the run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Final

from tests.hostile import drops, formats, http_requests, jsonl, model_requests, parquet, store, websocket
from tests.hostile.attack import Attack, Form

ATTACKS: Final[tuple[Attack, ...]] = (
    *http_requests.TABLE,
    *model_requests.TABLE,
    *websocket.TABLE,
    *jsonl.TABLE,
    *drops.TABLE,
    *parquet.TABLE,
    *formats.TABLE,
    *store.TABLE,
)


def chosen(form: Form, patterns: Sequence[str] = (), *, quick: bool = False) -> list[Attack]:
    """Attacks on a form of deployment whose names match one of the patterns; no patterns: all. Raises ValueError where
    a pattern matches none of any form."""
    for pattern in patterns:
        if not any(fnmatch(attack.name, pattern) for attack in ATTACKS):
            raise ValueError(f"no attack is named {pattern!r}; see --list")
    return [
        attack
        for attack in ATTACKS
        if form in attack.forms
        and (not quick or attack.quick)
        and (not patterns or any(fnmatch(attack.name, pattern) for pattern in patterns))
    ]
