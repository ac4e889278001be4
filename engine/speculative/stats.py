"""What became of drafts: counted by who made them, and by their place behind the known tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """Of one source of drafts; entry i of a tuple counts those that stood i places behind the first guess.

    Attributes:
        drafted: tokens guessed.  accepted: of them, those that stayed.
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
        sources: by who made the drafts ("ngram", "siblings", "draft", "eagle3").
        gained: tokens that drafts brought beyond what the same time would have brought without them, as
            `engine.speculative.gain` estimates it; below 0 where they cost more than they brought.
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
        """Tokens per second that drafting gains while it drafts; None: there was nothing to compare with."""
        return self.gained / self.compared_seconds if self.compared_seconds else None


class DraftCounter:
    """Counts drafts."""

    def __init__(self) -> None:
        self._lengths: dict[str, tuple[list[int], list[int]]] = {}

    def note(self, source: str, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` stayed."""
        for lengths, length in zip(self._lengths.setdefault(source, ([], [])), (drafted, accepted), strict=True):
            lengths.extend([0] * (length + 1 - len(lengths)))
            lengths[length] += 1

    @property
    def sources(self) -> Mapping[str, SourceCounts]:
        """What was counted, by who made the drafts."""
        sources = {}
        for source, (drafted, accepted) in self._lengths.items():
            width = len(drafted) - 1
            sources[source] = SourceCounts(_reaching(drafted, width), _reaching(accepted, width))
        return MappingProxyType(sources)


def _reaching(lengths: list[int], width: int) -> tuple[int, ...]:
    """From how many drafts had each length, how many were longer than 0, 1, …"""
    return tuple(sum(lengths[i + 1 :]) for i in range(width))
