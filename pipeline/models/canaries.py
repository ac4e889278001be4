"""What each version of a model answers to the canary prompts: `canaries/KEY.json`, written once by the first worker
that had it (or by `tokenmill canary record`), and what later workers must answer, too.

`canaries/failed/` holds a record of each worker that answered something else, and so never served: it can't be asked
for its figures any more.
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
        """What the model of this pin answers; None: nobody has recorded it. Raises `LedgerError`."""
        key = _key(pin)
        try:
            data = self._store.read(key)
        except ObjectNotFound:
            return None
        return parse_stored(self._store.locate(key), data, CanaryRecord)

    def record(self, record: CanaryRecord) -> bool:
        """Write it down; False when another was first, which then counts."""
        return self._store.create(_key(record.pin), record.to_json())

    def forget(self, pin: ModelPin) -> None:
        """Somebody says that the record is wrong."""
        self._store.delete(_key(pin))

    def failed(self, failure: CanaryFailure) -> None:
        """A worker found other answers."""
        self._store.create(f"{FAILED}{failure.pin.key}-{failure.worker}.json", failure.to_json())

    def failures(self) -> Counter[str]:
        """How many workers found other answers, by the model's name."""
        found: Counter[str] = Counter()
        for info in self._store.list(FAILED):
            failure = parse_stored(self._store.locate(info.key), self._store.read(info.key), CanaryFailure)
            found[failure.pin.name] += 1
        return found


def _key(pin: ModelPin) -> str:
    return f"{CANARIES}{pin.key}.json"


def difference(recorded: Sequence[CanaryAnswer], found: Sequence[CanaryAnswer], tolerance: float) -> str | None:
    """In what answers differ by more than rounding explains; None: in nothing.

    Another token is rounding's doing where the recorded one led by less than twice the tolerance; behind it the answers
    have different pasts, and aren't compared. `tolerance`: of log-probabilities (nats), and of a vector's numbers.
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
    for place, token in enumerate(was.tokens):
        if place >= len(now.tokens) or now.tokens[place] != token:
            if was.logprobs[place] - was.runners_up[place] < 2 * tolerance:
                return None
            got = now.tokens[place] if place < len(now.tokens) else "the end"
            return f"token {place} is {got}, but {token} was recorded, and led clearly"
        off = abs(was.logprobs[place] - now.logprobs[place])
        if not off <= tolerance:  # NaN is beyond every bound
            return f"the log-probability of token {place} is off by {off:.3g}, and {tolerance:g} is tolerated"
    return None
