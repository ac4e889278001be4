"""Writes golden files: run it once, when a version is raised, or when kinds and fields were added to one, and never
over files that stand.

    python -m tests.schemas.make_golden tests/schemas/golden/v2
    python -m tests.schemas.make_golden tests/schemas/golden/v1.2    # only what no folder of v1 has like this
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.schemas.golden_samples import Golden, samples


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    version = folder.name.partition(".")[0]
    for name, golden in samples().items():
        path = folder / name
        if path.exists():
            print(f"{path}: stands, and is left as it is")
        elif not any(same(other, golden) for other in folder.parent.glob(f"{version}*/{name}")):
            path.write_bytes(golden.data)


def same(path: Path, golden: Golden) -> bool:
    """Whether the file has the content that is written today. (Parquet's bytes change with its library.)"""
    return bool(golden.read(path.read_bytes()) == golden.read(golden.data))


if __name__ == "__main__":
    main()
