"""Writes a bill of materials (CycloneDX, JSON) of each image's Python packages, with their licences.

    python -m infra.sbom [control] [worker] [vllm] --tool CYCLONEDX_PY --out FOLDER

Needs no image: it installs the Dockerfile's packages, with the same extras and pins, into a new environment, which
cyclonedx-py describes. A package that differs from its pin is an error, and so is torch in the control image. The
worker gets the torch build that pip finds: PIP_EXTRA_INDEX_URL selects another one, like the Dockerfile's TORCH_INDEX.
The image of vLLM gets gigabytes of CUDA's packages. Packages of the base images are missing; `docker build --sbom=true`
lists those.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[1]
IMAGES: Final = REPOSITORY / "infra" / "images"
NAMES: Final = ("control", "worker", "vllm")
TOOLS: Final = {"pip", "setuptools", "wheel"}
"""Packages of every new environment, whose versions are not checked."""


def extras(dockerfile: str) -> str:
    """Extras of tokenmill that the image installs, such as "aws,kafka"."""
    found = re.search(r'"\.\[([a-z0-9,-]+)\]"', dockerfile)
    if found is None:
        raise ValueError("the Dockerfile installs no '.[extras]'")
    return found[1]


def constraints_file(image: str) -> Path:
    """The file that pins the image's packages."""
    return IMAGES / ("vllm-constraints.txt" if image == "vllm" else "constraints.txt")


def pins(constraints: str) -> dict[str, str]:
    """Versions by normalized name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", constraints, re.MULTILINE)
    return {normalized(name): version for name, version in found}


def normalized(name: str) -> str:
    """A package name in the form in which indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def problems(image: str, bill: Mapping[str, Any], wanted: Mapping[str, str]) -> list[str]:
    """Errors of a bill of materials: packages that it must not hold, and missing ones."""
    found = {normalized(one["name"]): one for one in bill.get("components", [])}
    messages = []
    for name, one in sorted(found.items()):
        version = str(one.get("version", "")).partition("+")[0]  # only the public part of a local version is pinned
        if name in TOOLS:
            continue
        if name not in wanted and not name.startswith(("nvidia-", "cuda-")):  # torch pins these itself
            messages.append(f"{name} {version} is not pinned in {constraints_file(image).relative_to(REPOSITORY)}")
        elif wanted.get(name, version) != version:
            messages.append(f"{name} is {version}, and pinned to {wanted[name]}")
        if "purl" not in one:
            messages.append(f"{name} can't be looked up: it has no package URL")
    if not found.keys() - TOOLS:
        messages.append("it has no components")
    if image == "control" and "torch" in found:
        messages.append("the control side has torch")
    return messages


def unlicensed(bill: Mapping[str, Any]) -> list[str]:
    """Packages without licence information."""
    return sorted(one["name"] for one in bill.get("components", []) if not one.get("licenses"))


def describe(image: str, tool: str, out: Path) -> dict[str, Any]:
    """Install the image's packages, and write and return their bill of materials. Raises `CalledProcessError`."""
    chosen = extras((IMAGES / f"{image}.Dockerfile").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--constraint", str(constraints_file(image)), f"{REPOSITORY}[{chosen}]"], check=True)
        made = out / f"{image}.cdx.json"
        made.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [tool, "environment", "--pyproject", str(REPOSITORY / "pyproject.toml"), "--output-reproducible",
             "--output-file", str(made), str(python)],
            check=True,
        )  # fmt: skip
    return dict(json.loads(made.read_text(encoding="utf-8")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(NAMES)}; all, unless named")
    parser.add_argument("--tool", default="cyclonedx-py", help="its command")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "sbom")
    args = parser.parse_args()
    if unknown := sorted(set(args.images) - set(NAMES)):
        parser.error(f"{unknown[0]!r} is no image; there are {', '.join(NAMES)}")
    failed = False
    for image in args.images or NAMES:
        bill = describe(image, args.tool, args.out)
        print(f"{args.out / f'{image}.cdx.json'}: {len(bill['components'])} packages")
        print(f"  without licence information: {', '.join(unlicensed(bill)) or 'none'}")
        wanted = pins(constraints_file(image).read_text(encoding="utf-8"))
        for line in problems(image, bill, wanted):
            failed = True
            print(f"  WRONG: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
