"""Verification of an ended job's results against its manifest.

tokenmill never changes a committed part; disks, people and lifecycle rules may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pipeline.ledger.ledger import RESULTS, JobLedger, part_number
from pipeline.ports import ObjectNotFound, PipelineError
from schemas.jobs.outcome import JobStatus, Manifest

SHOWN: Final = 3
"""Maximum number of damaged files that the error names."""


class ResultsDamaged(PipelineError):
    """Raised when files of a job's results are missing, or aren't those that its manifest lists."""


def check_files(ledger: JobLedger, manifest: Manifest, *, hashes: bool = False) -> int:
    """Compare the parts with the manifest, by name and size (one listing); returns the number of parts. Results that
    were removed after their retention period are not checked.

    Args:
        hashes: compare the contents too; reads every byte.

    Raises:
        ResultsDamaged: they differ.
    """
    if ledger.tombstone() is not None:
        return 0
    wrong = list(_wrong(ledger, manifest, hashes=hashes))
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ResultsDamaged(
            f"{ledger.location(RESULTS)}: the results are damaged: {'; '.join(wrong[:SHOWN])}{more}. Restore the files "
            "from a copy, or compute the job again ('run --fresh', or submit its input anew)"
        )
    return len(manifest.files)


def _wrong(ledger: JobLedger, manifest: Manifest, *, hashes: bool) -> Iterator[str]:
    standing = {info.key: info.size for _, info in ledger.parts()}
    for file in manifest.files:
        size = standing.pop(file.path, None)
        if size is None:
            yield f"{file.path} is missing ({file.rows} rows)"
        elif size != file.size:
            yield f"{file.path} has {size} bytes instead of {file.size}"
        elif hashes and _hash(ledger, file.path) != file.sha256:
            yield f"{file.path} has other contents than were committed"
    if manifest.files and manifest.status is not JobStatus.FAILED:  # else a late part may exist (`result_parts`)
        yield from (f"{key} is no part of this job" for key in standing)


def _hash(ledger: JobLedger, path: str) -> str | None:
    number = part_number(path)
    assert number is not None  # as the manifest was made
    try:
        return ledger.hash_part(number)
    except ObjectNotFound:
        return None
