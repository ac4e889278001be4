"""The canary records of model versions: `canaries/KEY.json` has the answers to the canary prompts. The first worker
that loads a version (or `tokenmill canary record`) writes it once, and later workers must give the same answers.

`canaries/failed/` has a record of each worker that gave other answers, and so never served: such a worker reports no
metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from pipeline.ledger.ledger import parse_stored
from pipeline.ports import ObjectNotFound, ObjectStore
from schemas.models import ModelPin
from schemas.releases import CanaryAnswer, CanaryFailure, CanaryRecord

CANARIES: Final = "canaries/"
FAILED: Final = f"{CANARIES}failed/"


class Canaries:
    """The canary records of a root."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def find(self, pin: ModelPin) -> CanaryRecord | None:
        """The record of this pin's model; None: there is none yet. Raises `LedgerError`."""
        key = _key(pin)
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return parse_stored(self._store.locate(key), data, CanaryRecord)

    def record(self, record: CanaryRecord) -> bool:
        """Store the record; False when another one was stored first, which then counts."""
        return self._store.create(_key(record.pin), record.to_json())

    def forget(self, pin: ModelPin) -> None:
        """Delete a record that is wrong."""
        self._store.delete(_key(pin))

    def failed(self, failure: CanaryFailure) -> None:
        """Record a worker whose answers differed."""
        self._store.create(f"{FAILED}{failure.pin.key}-{failure.worker}.json", failure.to_json())

    def failures(self) -> Counter[str]:
        """Number of workers whose answers differed, by the model's name."""
        found: Counter[str] = Counter()
        for info in self._store.list(FAILED):
            failure = parse_stored(self._store.locate(info.key), self._store.read(info.key), CanaryFailure)
            found[failure.pin.name] += 1
        return found


def _key(pin: ModelPin) -> str:
    return f"{CANARIES}{pin.key}.json"


def difference(recorded: Sequence[CanaryAnswer], found: Sequence[CanaryAnswer], tolerance: float) -> str | None:
    """The first difference between answers that rounding doesn't explain; None: there is none.

    Rounding explains another token where the recorded one led by less than twice the tolerance. Tokens after it have
    another context, and aren't compared. `tolerance`: of log-probabilities (nats), and of a vector's numbers.
    """
    if [answer.prompt for answer in recorded] != [answer.prompt for answer in found]:
        return "the canary prompts are other tokens than were recorded"
    for number, (was, now) in enumerate(zip(recorded, found, strict=True)):
        if (reason := _difference(was, now, tolerance)) is not None:
            return f"canary prompt {number}: {reason}"
    return None


def _difference(was: CanaryAnswer, now: CanaryAnswer, tolerance: float) -> str | None:
    if len(was.vector) != len(now.vector):
        return f"a vector of {len(now.vector)} numbers, but {len(was.vector)} were recorded"
    furthest = max((abs(a - b) for a, b in zip(was.vector, now.vector, strict=True)), default=0.0)
    if not furthest <= tolerance:
        return f"the vector is off by {furthest:.3g}, and {tolerance:g} is tolerated"
    for index, token in enumerate(was.tokens):
        if index >= len(now.tokens) or now.tokens[index] != token:
            if was.logprobs[index] - was.runners_up[index] < 2 * tolerance:
                return None
            got = now.tokens[index] if index < len(now.tokens) else "the end"
            return f"token {index} is {got}, but {token} was recorded, and led clearly"
        off = abs(was.logprobs[index] - now.logprobs[index])
        if not off <= tolerance:  # NaN is beyond every bound
            return f"the log-probability of token {index} is off by {off:.3g}, and {tolerance:g} is tolerated"
    return None
