"""vLLM for a machine without a network: its wheels, cut to what one engine on one GPU loads, in parts of a size.

    python -m benchmarks.gpu.carry pack --to .vllm        where there is a package index: .vllm/a, .vllm/b, …
    python -m benchmarks.gpu.carry unpack .vllm/a --to SITE       there, part by part
    python -m benchmarks.gpu.carry whole SITE                     status 0 if all parts have come

What is left out is loaded by other models, other GPUs or its server. Its libraries are compiled for one version of
torch (`VLLM` below says which), which that machine must have. Each part is a folder with files of xz and a manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

VLLM = "vllm==0.26.0"
"""For torch 2.11 with CUDA 13."""

BESIDE = (
    "annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "fastapi", "httpcore2", "httpx2", "jiter",
    "llguidance==1.7.6", "msgspec", "openai", "openai-harmony", "opentelemetry-api", "partial-json-parser", "pybase64",
    "pydantic", "pydantic-core", "pyzmq", "sniffio", "starlette", "truststore", "typing-inspection", "xgrammar==0.2.3",
)  # fmt: skip
"""What it imports for an offline engine beside torch, transformers and what these bring. A later xgrammar wants another
apache-tvm-ffi than the one that vLLM pins."""

DROPPED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_moe_C*",
    "vllm/vllm-rs*",
    "vllm/*deep_gemm*",
    "vllm/*fmha_sm100*",
    "*.a",
)
"""Of files that are no Python: another FlashAttention, experts, the server's front end, other GPUs' kernels."""

PART_BYTES = 46 << 20
"""Of a part at most: with the repository's own files it stays below 64 MiB."""

LARGE = 4 << 20
"""A file from this size on is packed by itself."""

SLICE = 32 << 20
"""Of a large file, before it is packed: a longer one travels in slices, so that parts come out even."""

_MANIFEST = "manifest.json"
_MARK = ".carried.json"
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014", "manylinux1")
_PRESET = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """A packed file: a tar of many small files, or a slice of one large file at `path`.

    Attributes:
        name: of the file in its part's folder.  path: where it goes; None: it is a tar.
        offset: of the slice in the file at `path`, bytes.
        sha256: of the packed file.  packed, raw: bytes.
    """

    name: str
    path: str | None
    offset: int
    sha256: str
    packed: int
    raw: int


def kept(path: str) -> bool:
    """Whether a wheel's file is needed there: Python always is, since modules import each other."""
    if path.endswith("/") or ".data/scripts/" in path or ".data/data/" in path:
        return False
    return path.endswith(".py") or not any(fnmatch(path, pattern) for pattern in DROPPED)


def installed_path(path: str) -> str:
    """Where a wheel's file lies once it is installed."""
    return re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", path)


def files_of(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Paths and contents of all that is kept, wheel by wheel."""
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                if kept(path):
                    yield installed_path(path), archive.read(path)


def pack(
    wheels: Iterable[Path], to: Path, *, part_bytes: int = PART_BYTES, large: int = LARGE, slice_bytes: int = SLICE
) -> list[list[Piece]]:
    """Pack the wheels into `to`/a, `to`/b, …; what went into each.

    Raises:
        ValueError: a single piece is larger than a part.
    """
    scratch = to / "packing"
    scratch.mkdir(parents=True, exist_ok=True)
    pieces: list[Piece] = []
    small = io.BytesIO()
    with tarfile.open(fileobj=small, mode="w") as rest:
        for path, content in files_of(wheels):
            if len(content) >= large:
                for offset in range(0, len(content), slice_bytes):
                    name = f"{path.replace('/', '+')}@{offset}"
                    pieces.append(_packed(scratch, name, path, content[offset : offset + slice_bytes], offset))
                continue
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            rest.addfile(entry, io.BytesIO(content))
    pieces.append(_packed(scratch, "rest.tar", None, small.getvalue()))
    parts = divided(pieces, part_bytes)
    names = [piece.name for piece in pieces]
    for letter, part in zip("abcdefghijklmnopqrstuvwxyz", parts, strict=False):
        folder = to / letter
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for piece in part:
            (scratch / piece.name).rename(folder / piece.name)
        manifest = {"all": names, "pieces": [asdict(piece) for piece in part]}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    scratch.rmdir()
    return parts


def _packed(folder: Path, name: str, path: str | None, content: bytes, offset: int = 0) -> Piece:
    packed = lzma.compress(content, preset=_PRESET)
    (folder / f"{name}.xz").write_bytes(packed)
    return Piece(f"{name}.xz", path, offset, hashlib.sha256(packed).hexdigest(), len(packed), len(content))


def divided(pieces: Sequence[Piece], part_bytes: int) -> list[list[Piece]]:
    """Into as few parts as the largest-first rule finds, none larger than `part_bytes`, and as even as it makes them.

    Raises:
        ValueError: a piece is larger than a part.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.packed)
    if ordered and ordered[0].packed > part_bytes:
        raise ValueError(f"{ordered[0].name} has {ordered[0].packed} bytes, but a part may have {part_bytes}")
    for count in range(1, len(ordered) + 1):
        parts: list[list[Piece]] = [[] for _ in range(count)]
        for piece in ordered:
            min(parts, key=_size).append(piece)
        if max(map(_size, parts)) <= part_bytes:
            return parts
    return []


def _size(part: Sequence[Piece]) -> int:
    return sum(piece.packed for piece in part)


def unpack(part: Path, site: Path) -> list[str]:
    """Unpack a part into `site`, which then can be put on PYTHONPATH; the names of its pieces.

    Raises:
        ValueError: a file is not what the manifest says.
    """
    manifest = json.loads((part / _MANIFEST).read_text(encoding="utf-8"))
    site.mkdir(parents=True, exist_ok=True)
    done = []
    for each in manifest["pieces"]:
        piece = Piece(**each)
        packed = (part / piece.name).read_bytes()
        if hashlib.sha256(packed).hexdigest() != piece.sha256:
            raise ValueError(f"{part / piece.name} is damaged")
        content = lzma.decompress(packed)
        if piece.path is None:
            with tarfile.open(fileobj=io.BytesIO(content)) as rest:
                rest.extractall(site, filter="data")
        else:
            into = site / piece.path
            if not into.resolve().is_relative_to(site.resolve()):
                raise ValueError(f"{piece.path} leads out of {site}")
            into.parent.mkdir(parents=True, exist_ok=True)
            into.touch()
            with into.open("r+b") as whole_file:
                whole_file.seek(piece.offset)
                whole_file.write(content)
        done.append(piece.name)
    mark = _marked(site)
    mark = {"all": manifest["all"], "done": sorted({*mark.get("done", []), *done})}
    (site / _MARK).write_text(json.dumps(mark), encoding="utf-8")
    return done


def whole(site: Path) -> bool:
    """Whether all pieces have been unpacked there."""
    mark = _marked(site)
    return bool(mark) and set(mark["all"]) == set(mark["done"])


def _marked(site: Path) -> dict[str, list[str]]:
    path = site / _MARK
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def download(to: Path, python: str = "3.12") -> list[Path]:
    """The wheels for Linux on x86-64, each without what it requires; exact pins among them are obeyed."""
    to.mkdir(parents=True, exist_ok=True)
    fetch(to, [VLLM, *BESIDE], python)
    wanted = pins(to.glob("*.whl"))
    for package, exact in wanted.items():
        if package in {name.partition("==")[0] for name in BESIDE}:
            for other in to.glob(f"{package.replace('-', '_')}-*.whl"):
                if other.name.split("-")[1] != exact:
                    other.unlink()
            fetch(to, [f"{package}=={exact}"], python)
    return sorted(to.glob("*.whl"))


def fetch(to: Path, packages: Sequence[str], python: str) -> None:
    """pip's download of these, for another machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(to)]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    subprocess.run([*command, *packages], check=True)


def pins(wheels: Iterable[Path]) -> Mapping[str, str]:
    """Package -> version, of all exact requirements that hold without an extra."""
    found = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode(errors="replace")
        for line in text.splitlines():
            match = re.match(r"Requires-Dist: ([A-Za-z0-9._-]+) ?\(?==([0-9][^;,) ]*)\)? *(;.*)?$", line)
            if match is not None and "extra" not in (match[3] or ""):
                found[match[1].lower().replace("_", "-")] = match[2]
    return found


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download, cut and pack")
    packing.add_argument("--to", type=Path, required=True)
    packing.add_argument("--wheels", type=Path, default=None, help="a folder with the wheels: nothing is downloaded")
    packing.add_argument("--python", default="3.12", help="of the machine they are for")
    packing.add_argument("--part-mib", type=int, default=PART_BYTES >> 20)
    unpacking = commands.add_parser("unpack", help="unpack a part")
    unpacking.add_argument("part", type=Path)
    unpacking.add_argument("--to", type=Path, required=True)
    checking = commands.add_parser("whole", help="status 0 if all parts are there")
    checking.add_argument("site", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "pack":
        wheels = sorted(args.wheels.glob("*.whl")) if args.wheels else download(args.to / "wheels", args.python)
        for part in pack(wheels, args.to, part_bytes=args.part_mib << 20):
            print(f"{_size(part) / 2**20:.1f} MiB: " + ", ".join(f"{p.name} {p.packed / 2**20:.1f}" for p in part))
    elif args.command == "unpack":
        print(f"{args.part}: {', '.join(unpack(args.part, args.to))}")
    else:
        return 0 if whole(args.site) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
