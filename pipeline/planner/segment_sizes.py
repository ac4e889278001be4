"""The sizes of segments: small ones first, so that work begins soon; large ones later, which have more copies and
shared prefixes. The boundaries depend on settings alone, so all planners of a job agree on them."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.requests.limits import PlanSettings


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """The first segment has `first` input rows, each next one twice as many as the previous, but at most `most`."""

    first: int
    most: int

    @classmethod
    def of(cls, settings: PlanSettings) -> SegmentSizes:
        return cls(min(settings.first_segment_rows, settings.segment_rows), settings.segment_rows)

    def index(self, row: int) -> int:
        """The index of the segment that contains the row."""
        return self._locate(row)[0]

    def end(self, row: int) -> int:
        """The row after the segment that contains `row`."""
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
