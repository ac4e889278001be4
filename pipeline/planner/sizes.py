"""Where segments end: small ones first, so that work begins soon; large ones later, in which more copies and shared
prefixes meet. The borders depend on settings alone, so all planners of a job agree on them."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.requests.limits import PlanSettings


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """The first segment has `first` input rows, each next one twice as many as the one before, but at most `most`."""

    first: int
    most: int

    @classmethod
    def of(cls, settings: PlanSettings) -> SegmentSizes:
        return cls(min(settings.first_segment_rows, settings.segment_rows), settings.segment_rows)

    def index(self, row: int) -> int:
        """The segment that holds the row."""
        return self._locate(row)[0]

    def end(self, row: int) -> int:
        """The row behind the segment that holds `row`."""
        return self._locate(row)[1]

    def _locate(self, row: int) -> tuple[int, int]:
        index, end, size = 0, self.first, self.first
        while end <= row and size < self.most:
            size = min(2 * size, self.most)
            index, end = index + 1, end + size
        if end <= row:
            more = (row - end) // size + 1
            index, end = index + more, end + more * size
        return index, end
