"""Reads many damaged files."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Callable, Sequence

from pipeline.planner import InputError


def read_damaged(
    bases: Sequence[bytes],
    damaged: Callable[[bytes, random.Random], bytes],
    read: Callable[[bytes], object],
    count: int,
    seed: int,
) -> Counter[str]:
    """The outcomes of reading so many damaged files; any other error than `InputError` is raised."""
    chosen, found = random.Random(seed), Counter[str]()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, before[1]))  # a size that a file declares may be any
    try:
        for number in range(count):
            data = damaged(chosen.choice(bases), chosen)
            try:
                read(data)
                found["read"] += 1
            except InputError:
                found["refused"] += 1
            except BaseException as error:
                error.add_note(f"seed {seed}, file {number}")
                raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return found
