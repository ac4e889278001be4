"""Writes the golden files of the present version: run it once, when a version is raised, and never over files that
stand.

    python -m tests.schemas.make_golden tests/schemas/golden/v2
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.schemas.golden_samples import samples


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, golden in samples().items():
        path = folder / name
        if path.exists():
            print(f"{path}: stands, and is left as it is")
        else:
            path.write_bytes(golden.data)


if __name__ == "__main__":
    main()
