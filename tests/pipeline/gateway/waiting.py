"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(what: Callable[[], Any], why: str, seconds: float = 10.0) -> Any:
    limit = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < limit, why
        time.sleep(0.01)
    return value
