"""The ladder of degradation: which of the ordered steps are active, by one number, the load.

Hysteresis keeps it from flapping: a step begins at `enter_load` and ends at `leave_load`, which is lower, and only when
the load has stayed there for a while since the last change. One step changes at a time: the effect of a step shows
before the next one is tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.settings.overload import OverloadOptions


@dataclass(frozen=True, slots=True)
class LadderRules:
    """Thresholds of the load (1: requests wait for as long as their promise allows), and how long it must stay beyond
    one; as in `OverloadOptions`."""

    enter_load: float
    leave_load: float
    enter_seconds: float
    leave_seconds: float

    @classmethod
    def of(cls, options: OverloadOptions) -> LadderRules:
        return cls(options.enter_load, options.leave_load, options.enter_seconds, options.leave_seconds)


class DegradationLadder:
    """The state of one model's ladder.

    Attributes:
        depth: number of active steps, the first ones in the operator's order.
    """

    def __init__(self, rules: LadderRules, num_steps: int, now: float) -> None:
        self.depth = 0
        self._rules = rules
        self._num_steps = num_steps
        self._below_enter_at = self._above_leave_at = now  # the last time that it was; a change counts as both

    def update(self, load: float, now: float) -> int:
        """Process the highest load since the last call. Returns 1 if a step begins, -1 if one ends, else 0."""
        rules = self._rules
        if load < rules.enter_load:
            self._below_enter_at = now
        if load > rules.leave_load:
            self._above_leave_at = now
        change = 0
        if now - self._below_enter_at >= rules.enter_seconds and self.depth < self._num_steps:
            change = 1
        elif now - self._above_leave_at >= rules.leave_seconds and self.depth:
            change = -1
        if change:
            self.depth += change
            self._below_enter_at = self._above_leave_at = now
        return change
