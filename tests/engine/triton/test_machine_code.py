"""What Triton's kernels cost a GPU, at the shapes of published models: budgets that their machine code stays within."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="NOT TESTED HERE: Triton's kernels; triton is not installed")

from tests.engine.triton.machine_code import CASES, VOCABULARIES, MachineCode, programs_that_fit, read_ahead
from tests.waiting import HANG_SECONDS


class Budget(NamedTuple):
    """What a kernel must reach.

    programs: at least so many fit a multiprocessor.
    in_flight: at least so many KiB of a multiprocessor's asynchronous copies are not waited for yet.
    narrow: at most so many loads and copies of fewer than 16 bytes a thread: of block tables, lengths and factors.
    spills: at most so many instructions read or write the stack: registers that were spilled to it.
    """

    programs: int
    in_flight: int
    narrow: int
    spills: int = 0


BUDGETS = {
    # Attention needs about 33 KiB of a multiprocessor in flight for a Hopper's bandwidth: half a microsecond of it.
    ("decode bf16", "attend_tiles"): Budget(4, 128, 53),
    ("decode bf16, split", "attend_tiles"): Budget(4, 128, 53),
    ("decode bf16, SmolLM2-1.7B", "attend_tiles"): Budget(6, 112, 29),
    ("decode bf16, SmolLM2-135M", "attend_tiles"): Budget(5, 96, 29),
    ("decode fp8", "attend_tiles"): Budget(8, 128, 20, spills=32),  # Triton 3.9; of 2,700 instructions
    ("decode fp8, split", "attend_tiles"): Budget(8, 128, 20),
    ("decode fp8, SmolLM2-135M", "attend_tiles"): Budget(8, 64, 40),
    ("decode float32", "attend_tiles"): Budget(2, 128, 101),
    ("shared bf16", "attend_tiles"): Budget(4, 128, 54),
    ("shared fp8", "attend_tiles"): Budget(2, 128, 65),
    # Shared keys come from the second cache, whose latency is a third of the memory's, to all but the first of a group.
    ("shared bf16", "attend_shared"): Budget(2, 64, 56),
    ("shared bf16, SmolLM2-135M", "attend_shared"): Budget(3, 48, 32),
    ("shared fp8", "attend_shared"): Budget(2, 20, 80),
    ("shared float32", "attend_shared"): Budget(3, 96, 56),
    ("chunk bf16", "attend_tiles"): Budget(2, 64, 53),
    ("chunk bf16, SmolLM2-135M", "attend_tiles"): Budget(3, 48, 29),
    ("chunk fp8", "attend_tiles"): Budget(2, 32, 141),
    ("chunk float32", "attend_tiles"): Budget(3, 96, 53),
    # Products with small weights: the codes and inputs that are read ahead.
    **{
        (f"{form}, {rows} rows", "_small_weight_product"): Budget(programs, in_flight, narrow)
        for form, narrow in (("int4 by 32", 1), ("int4 by 128", 2), ("Q4_K", 4), ("int8 by rows", 2))
        for rows, programs, in_flight in ((16, 7, 128), (32, 4, 96), (64, 3, 88), (128, 2, 72))
    },
    ("int4 by 128, 16 rows, K = 14336", "_small_weight_product"): Budget(7, 128, 2),
    ("int4 by 32, 16 rows, K = 576", "_small_weight_product"): Budget(7, 128, 1),
    **{
        (f"{form}, 256 rows", "_dequantize"): Budget(10, 0, narrow)
        for form, narrow in (("int4 by 32", 1), ("int4 by 128", 2), ("Q4_K", 4), ("int8 by rows", 2))
    },
    ("fp8 by blocks, 16 rows", "_grouped_product"): Budget(6, 112, 6),
    ("fp8 by blocks, 256 rows", "_grouped_product"): Budget(2, 88, 4),
    # A row's parameters are the narrow ones.
    **{(f"draws, {model}", "_draw_rows"): Budget(2, 48, 6) for model in VOCABULARIES},
    # A layer's operations read rows: as many programs as fit keep memory busy.
    **{
        (case, kernel): Budget(programs, 0, narrow)
        for case in CASES
        if case.startswith("layer")
        for kernel, programs, narrow in (("_add_norm", 2, 0), ("_rotate_and_store", 9, 7), ("_activate", 1, 0))
    },
}
FEW = ["int4 by 32, 16 rows"]
"""Cases that are compiled in CI; the others are exhaustive."""


def compiled(cases: list[str], cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.triton.machine_code", *cases],
        env=environment | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=4 * HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, pytest.param(list(CASES), marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_kernels_stay_within_their_budgets(cases: list[str], tmp_path: Path) -> None:
    found = compiled(cases, tmp_path)
    kernels = {(each.pop("case"), each.pop("kernel")): each for each in found}
    assert {key for key in BUDGETS if key[0] in cases} <= set(kernels)
    over = []
    for key, values in kernels.items():
        code = MachineCode(**{name: _by_width(value) for name, value in values.items()})
        budget = BUDGETS.get(key, Budget(0, 0, 99))
        within = (
            code.programs >= budget.programs
            and code.in_flight >= budget.in_flight << 10
            and code.narrower(16) <= budget.narrow
            and code.spills <= budget.spills
            and (code.stack == 0 or budget.spills > 0)
        )
        over += [] if within else [(key, budget, code)]
    assert over == []


def _by_width(value: Any) -> Any:
    return {int(width): count for width, count in value.items()} if isinstance(value, dict) else value


def test_programs_fit_by_registers_shared_memory_and_threads() -> None:
    assert programs_that_fit(122, 39 << 10, 4) == 4
    assert programs_that_fit(220, 24 << 10, 4) == 2
    assert programs_that_fit(32, 76 << 10, 4) == 2
    assert programs_that_fit(16, 0, 16) == 4


def test_copies_are_in_flight_until_their_group_is_waited_for() -> None:
    copy, narrow = ("LDGSTS.E.BYPASS.LTC128B.128", "[R1], [R2]"), ("LDGSTS.E", "[R1], [R2]")
    commit, wait = ("LDGDEPBAR", ""), ("DEPBAR.LE", " SB0, 0x1")
    assert read_ahead([copy, commit, copy, commit, wait, narrow, commit]) == 32
    assert read_ahead([copy, commit, copy, commit, narrow, commit, wait]) == 36
    assert read_ahead([copy, narrow, commit, ("DEPBAR.LE", " SB0, 0x0"), copy]) == 20
