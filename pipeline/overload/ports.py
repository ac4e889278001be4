"""The port by which gateways report active degradation steps to workers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from schemas.settings.overload import StepName

WORKER_STEPS: Final[tuple[StepName, ...]] = ("pause_bulk", "drafts_off")
"""The steps that workers carry out; a gateway carries out the others by itself."""


class DegradationBoard(Protocol):
    """The active steps of each model. Nothing of it is durable: a step that no gateway reports any more ends by itself,
    so a dead gateway leaves no step active. Calls raise `ServiceUnavailable` when it can't be reached."""

    def report(self, model: str, steps: Collection[StepName], lifetime_seconds: float) -> None:
        """These steps of a model (by name) are active for so long, whatever other gateways report."""
        ...

    def active(self, model: str, among: Collection[StepName]) -> frozenset[StepName]:
        """The active ones of these steps of a model."""
        ...
