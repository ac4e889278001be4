"""An adapter's B in the kernels' form: nothing is lost, and columns that no result needs are not stored."""

from __future__ import annotations

import pytest
import torch

from engine.native.adapters import NativeAdapters
from engine.native.build import processor_sets
from engine.native.library import load_library
from engine.native.packing import panel_rows


@pytest.mark.parametrize("name", processor_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_panels_have_the_columns_that_they_need(name: str, dtype: torch.dtype, gated: bool) -> None:
    # Given the B of three modules, of ranks 5, 0 and 3, whose rows end inside a panel:
    library = load_library(name, 1)
    modules = ((44, 5), (44, 3)) if gated else ((44, 5), (60, 0), (21, 3))
    random = torch.Generator().manual_seed(1)
    b = torch.block_diag(*(torch.randn(rows, rank, generator=random) for rows, rank in modules))
    packed, ranks = NativeAdapters(library, 1, 1, 8, dtype, has_gates=True)._panels(b, gated=gated)
    rows, lanes = panel_rows(library, len(b), gated=gated), library.panel // 2
    found = torch.zeros(len(b), 8, dtype=dtype)
    for panel, (first, second, count, before) in enumerate(ranks.tolist()):
        assert count <= (5 if gated else 8)  # gates have 5 columns, and what they are multiplied with 3
        for c, row in enumerate(rows[panel * library.panel :][: library.panel].tolist()):
            stored = packed[before : before + count, c]
            if row < 0:
                assert not stored.any()
                continue
            begin = first if c < lanes else second
            assert 0 <= begin <= 8 - count
            found[row, begin : begin + count] = stored
    assert torch.equal(found, b.to(dtype))
    assert len(packed) == int(ranks[:, 2].sum())
