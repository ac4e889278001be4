"""Memory of packed weights: weights lie apart, in areas that ask for huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.native.weight_memory import AREA, HUGE_PAGE, WeightMemory


def flags_of(address: int) -> list[str]:
    """Flags of the mapping that holds an address (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_weights_lie_apart_and_the_next_area_begins_where_one_is_full() -> None:
    memory = WeightMemory()
    sizes = [100, AREA // 2, AREA // 2, 3 * AREA, 64]
    weights = [memory.take(size) for size in sizes]
    assert [len(weight) for weight in weights] == sizes
    for number, weight in enumerate(weights):
        assert weight.data_ptr() % 64 == 0
        weight[:10], weight[-10:] = number, number
    assert all(bool((part == number).all()) for number, of in enumerate(weights) for part in (of[:10], of[-10:]))
    assert weights[1].data_ptr() - weights[0].data_ptr() == 128, "small weights share an area"


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system's kernel has no huge pages"
)
def test_areas_ask_for_huge_pages() -> None:
    weight = WeightMemory().take(1)
    assert weight.data_ptr() % HUGE_PAGE == 0
    assert "hg" in flags_of(weight.data_ptr())
    assert "hg" not in flags_of(torch.empty(1).data_ptr())
