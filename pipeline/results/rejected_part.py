"""Publishing a segment's refused rows as a part of its own, from the file that the planner stored.

Any process can do so. If a planner dies right after its segment is committed, the next process completes the step, and
all of them make the same bytes.
"""

from __future__ import annotations

import hashlib

from pipeline.ledger.ledger import JobLedger, LedgerError
from pipeline.ports import ObjectNotFound, StoreError, World
from schemas.jobs.plan import PlanSegment

_CHUNK = 1 << 20


def commit_rejects(ledger: JobLedger, segment: PlanSegment, world: World) -> bool:
    """Make the part of a committed segment's refused rows, unless it exists already.

    Raises `LedgerError` when the stored file isn't the planned one, `StoreError` when it can't be copied.
    """
    rejects = segment.rejects
    if rejects is None or ledger.has_part(rejects.number):
        return False
    path = world.scratch / f"rejects-{rejects.number:05d}-{world.random.token(8).hex()}.parquet"
    digest = hashlib.sha256()
    try:
        with ledger.store.open(ledger.prefix + rejects.key) as stored, path.open("xb") as copy:
            while chunk := stored.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
        if digest.hexdigest() != rejects.sha256:
            raise LedgerError(
                f"{ledger.location(rejects.key)}: its bytes are not those that were planned; the disk may be bad"
            )
        return ledger.create_part(rejects.number, path)
    except ObjectNotFound as error:
        raise LedgerError(f"{ledger.location(rejects.key)}: is missing, but the plan refers to it") from error
    except OSError as error:
        raise StoreError(f"{path}: can't write results: {error.strerror or error}; free some space") from error
    finally:
        path.unlink(missing_ok=True)
