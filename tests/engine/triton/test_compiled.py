"""Triton's kernels become machine code for real GPUs, fit their shared memory, and are not compiled again and again.

The interpreter, in which the other tests run, knows nothing of types, of layouts, or of how much room there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from tests.engine.triton.compiling import SHARED
from tests.waiting import HANG_SECONDS


def compiled(part: str, capability: int, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.triton.compiling", part, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=2 * HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive  # half a minute of compiling each
@pytest.mark.parametrize("capability", [75, 80, 89, 90])
def test_attention_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    found = compiled("shapes", capability, tmp_path)
    assert {"attend_tiles", "attend_shared", "join_splits", "store_tokens"} <= {each["kernel"] for each in found}
    assert [each for each in found if each["shared"] > SHARED[capability]] == []


@pytest.mark.exhaustive
def test_steps_of_any_size_share_a_few_kernels(tmp_path: Path) -> None:
    """One for decoding rows and one for chunks, whole and split, and three where rows share keys, whatever the
    addresses, widths and numbers of a step are divisible by; all are compiled before the first step, and graphs take
    the same ones."""
    found = Counter(each["kernel"] for each in compiled("sizes", 90, tmp_path))
    assert found == {"store_tokens": 1, "attend_tiles": 5, "attend_shared": 1, "join_splits": 3}


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [90, 75])
def test_draws_of_steps_of_any_size_share_a_kernel(capability: int, tmp_path: Path) -> None:
    found = compiled("draws", capability, tmp_path)
    assert [each["kernel"] for each in found] == ["_draw_rows"]
    assert found[0]["shared"] <= SHARED[capability]


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [90, 75])
def test_low_rank_products_compile_and_fit_and_depend_on_their_tile_alone(capability: int, tmp_path: Path) -> None:
    """Whether a step is launched or recorded, and whatever its sizes are divisible by."""
    found = compiled("low_rank", capability, tmp_path)
    assert [each for each in found if each["shared"] > SHARED[capability]] == []
    counts = Counter(each["kernel"] for each in found)
    assert counts == {"_multiply_a": 2 * 2, "_add_b": 2 * 3}  # tiles, shapes


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 89])
def test_products_compile_and_fit_and_depend_on_their_tile_alone(capability: int, tmp_path: Path) -> None:
    found = compiled("products", capability, tmp_path)
    assert [each for each in found if each["shared"] > SHARED[capability]] == []
    counts = Counter(each["kernel"] for each in found)
    assert counts.pop("_small_weight_product") == 3 * 4  # forms, tiles
    assert counts.pop("_join_sums") == 1  # all are split alike
    assert counts.pop("_dequantize") == 3
    assert counts == {"_grouped_product": 2, "_quantize_groups": 1, "_quantize_rows": 1}
