"""Counts of drafts and accepted drafts, by source and by position behind the known tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Counts of one source of drafts; entry i of a tuple counts those at i positions behind the first draft.

    Attributes:
        drafted: draft tokens.  accepted: of them, the accepted ones.
    """

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts since the start.

    Attributes:
        sources: by source of the drafts ("ngram", "siblings", "draft", "eagle3").
        gained: tokens that drafts yielded beyond those of the same time without drafts, as `engine.speculative.gain`
            estimates it; below 0 where they cost more than they yielded.
        compared_seconds: time of the steps with drafts for which that could be estimated.
    """

    sources: Mapping[str, SourceCounts] = field(default_factory=lambda: MappingProxyType({}))
    gained: float = 0.0
    compared_seconds: float = 0.0

    @property
    def drafted(self) -> int:
        return sum(counts.num_drafted for counts in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(counts.num_accepted for counts in self.sources.values())

    @property
    def gained_per_second(self) -> float | None:
        """Tokens per second that drafting gains while it drafts; None: no step could be compared."""
        return self.gained / self.compared_seconds if self.compared_seconds else None


class DraftCounter:
    """Counts drafts."""

    def __init__(self) -> None:
        self._lengths: dict[str, tuple[list[int], list[int]]] = {}

    def record(self, source: str, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted."""
        for lengths, length in zip(self._lengths.setdefault(source, ([], [])), (drafted, accepted), strict=True):
            lengths.extend([0] * (length + 1 - len(lengths)))
            lengths[length] += 1

    @property
    def sources(self) -> Mapping[str, SourceCounts]:
        """The counts by source of the drafts."""
        sources = {}
        for source, (drafted, accepted) in self._lengths.items():
            width = len(drafted) - 1
            sources[source] = SourceCounts(_reaching(drafted, width), _reaching(accepted, width))
        return MappingProxyType(sources)


def _reaching(lengths: list[int], width: int) -> tuple[int, ...]:
    """Convert counts of drafts by length to counts of drafts longer than 0, 1, …"""
    return tuple(sum(lengths[i + 1 :]) for i in range(width))
