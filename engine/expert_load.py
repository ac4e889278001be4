"""How evenly the tokens of a mixture are spread over its experts, and over the ranks that hold them.

A layer takes as long as its busiest rank. So loads are compared by layer, and summed: a load of 2 says that the busiest
ones of all layers together had twice as many rows as they would have if all had as many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Rows of experts.

    Attributes:
        rows: int64 [layers, experts], rows that each expert has computed; zeros for layers without experts.
        ranks: int64 [layers, experts], the rank of each expert; None: each rank has a slice of all of them.
    """

    rows: NDArray[np.int64]
    ranks: NDArray[np.int64] | None = None

    def since(self, before: ExpertLoad) -> ExpertLoad:
        """Only the rows computed after `before` was read."""
        return replace(self, rows=self.rows - before.rows)

    @property
    def busiest_expert(self) -> float | None:
        """Rows of each layer's busiest expert over those of the mean one; None: there are none."""
        return _over_mean(self.rows)

    @property
    def busiest_rank(self) -> float | None:
        """Likewise of ranks; None also where no rank has whole experts."""
        if self.ranks is None:
            return None
        sums = [(self.rows * (self.ranks == rank)).sum(1) for rank in range(int(self.ranks.max()) + 1)]
        return _over_mean(np.stack(sums, axis=1))


def _over_mean(rows: NDArray[np.int64]) -> float | None:
    total = int(rows.sum())
    return None if total == 0 else float(rows.max(axis=1).sum() * rows.shape[1] / total)
