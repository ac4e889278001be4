"""The arrays for the kernels end right before a protected page: a read past the end kills the process.

`make test-memory` checks all reads and writes with AddressSanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.native.build import INSTRUCTION_SETS
from tests.native_paths import native_path

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]

GUARDED = """
import ctypes, mmap, sys
from dataclasses import replace
import numpy as np
import engine.runner.runner
from engine import CacheConfig, Engine, EngineConfig, Request, SamplingParams, ScheduleConfig, as_token_ids
from tests.native_paths import emulate_as_asked

emulate_as_asked()
PAGES, held = ctypes.CDLL(None, use_errno=True), []
PAGES.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_end(array, dtype):
    "The same numbers right before a page without access rights."
    room = -(-max(array.size * np.dtype(dtype).itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    held.append(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert PAGES.mprotect(start + room, mmap.PAGESIZE, 0) == 0
    end = np.frombuffer(pages, dtype=dtype, count=array.size, offset=room - array.size * np.dtype(dtype).itemsize)
    end[:] = array.ravel()
    return end.reshape(array.shape)

made = engine.runner.runner.step_batch

def guarded(*arguments):
    batch = made(*arguments)
    seen.add(batch.wanted is not None and len(batch.wanted) < batch.counts.sum())
    return replace(
        batch, starts=at_the_end(batch.starts, np.int32), counts=at_the_end(batch.counts, np.int32),
        block_tables=tuple(at_the_end(table, np.int32) for table in batch.block_tables),
        slot_mapping=tuple(at_the_end(slots, np.int64) for slots in batch.slot_mapping),
        wanted=None if batch.wanted is None else at_the_end(batch.wanted, np.int32),
    )

def answers():
    config = EngineConfig(
        dtype=sys.argv[2], attention="native", instruction_set=sys.argv[3], threads=1, max_model_len=96,
        cache=CacheConfig(block_size=16), schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    prompts = [[3 + (n + at) % 200 for at in range(30 + 5 * n)] for n in range(6)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    requests = [Request(str(n), as_token_ids(prompt), params) for n, prompt in enumerate(prompts)]
    done = Engine.load(sys.argv[1], config).run(requests)
    return {completion.request_id: completion.choices[0].token_ids.tolist() for completion in done}

seen = set()
want = answers()
engine.runner.runner.step_batch = guarded
assert answers() == want
assert seen == {True, False}, "steps in which few tokens are wanted, and others"
print("the same")
"""


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param("llama", "float32", marks=pytest.mark.exhaustive), ("gemma3", "bfloat16")]
)
def test_a_step_reads_nothing_behind_its_arrays(
    family: str, dtype: str, instructions: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    native_path(instructions)  # or skip
    (tmp_path / "guarded.py").write_text(GUARDED)
    done = subprocess.run(
        [sys.executable, tmp_path / "guarded.py", tiny_model(family), dtype, instructions],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
