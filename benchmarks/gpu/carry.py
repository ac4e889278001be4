"""vLLM for a machine without a network: its wheels, cut to what one engine on one GPU loads, in parts of a size.

    python -m benchmarks.gpu.carry pack --to .vllm        where there is a package index: .vllm/a, .vllm/b, …
    python -m benchmarks.gpu.carry unpack .vllm/a --to SITE       there, part by part
    python -m benchmarks.gpu.carry whole SITE                     status 0 if all parts have come

A call carries a part beside the working tree, and both together may be no more than `CALL_BYTES`. So all that is kept
becomes one archive, which is cut into equal chunks, as few as fit beside the tree as it is now. Each part is a folder
with a chunk and a manifest; the last one to arrive joins and unpacks them.

What is left out is loaded by other models, other GPUs or its server. Its libraries are compiled for one version of
torch (`VLLM` below says which), which that machine must have.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

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

CALL_BYTES = 64 << 20
"""Of what one call carries at most: the working tree and a part."""

MARGIN = 256 << 10
"""Of a call, for what is carried beside both."""

_MANIFEST = "manifest.json"
_CHUNKS = ".carried"
_WHOLE = ".whole"
_CHUNK = "chunk"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_BLOCK = 512
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014", "manylinux1")
_PRESET = 6


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of the archive's bytes.

    Attributes:
        index, count: of the chunk among all of them, from 0.
        sha256: of the chunk.  archive: sha256 of all chunks, joined.
    """

    index: int
    count: int
    sha256: str
    archive: str


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
        with zipfile.ZipFile(wheel) as zipped:
            for path in zipped.namelist():
                if kept(path):
                    yield installed_path(path), zipped.read(path)


def pack(wheels: Iterable[Path], to: Path, part_bytes: int) -> list[int]:
    """Pack the wheels into `to`/a, `to`/b, …, none larger than `part_bytes`; bytes of each.

    Raises:
        ValueError: no part may have that few bytes.
    """
    if part_bytes <= _BLOCK:
        raise ValueError(f"a part may have {part_bytes} bytes, which is no room for any")
    packed = archive(wheels)
    count = -(-len(packed) // (part_bytes - _BLOCK))  # the manifest has the rest
    if count > len(_LETTERS):
        raise ValueError(f"{len(packed)} bytes need {count} parts of {part_bytes}, but there are {len(_LETTERS)} names")
    for letter in _LETTERS:
        shutil.rmtree(to / letter, ignore_errors=True)
    whole_sha = hashlib.sha256(packed).hexdigest()
    sizes = []
    for index, letter in enumerate(_LETTERS[:count]):
        content = packed[len(packed) * index // count : len(packed) * (index + 1) // count]
        folder = to / letter
        folder.mkdir(parents=True)
        (folder / _CHUNK).write_bytes(content)
        chunk = Chunk(index, count, hashlib.sha256(content).hexdigest(), whole_sha)
        (folder / _MANIFEST).write_text(json.dumps(asdict(chunk)) + "\n", encoding="utf-8")
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
        if sizes[-1] > part_bytes:
            raise ValueError(f"{folder} has {sizes[-1]} bytes, but a part may have {part_bytes}")
    return sizes


def archive(wheels: Iterable[Path]) -> bytes:
    """All that is kept, as a .tar.xz."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w:xz", preset=_PRESET) as tar:
        for path, content in files_of(wheels):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return into.getvalue()


def tree_bytes(root: Path) -> int:
    """What a working tree is when it is carried: a tar of the files that git tracks, or would track.

    Raises:
        subprocess.CalledProcessError: it is no git repository.
    """
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True).stdout.split(b"\0")
    paths = [root / os.fsdecode(name) for name in set(names) if name]
    sizes = [path.lstat().st_size for path in paths if path.is_file()]
    return sum(_BLOCK + -(-size // _BLOCK) * _BLOCK for size in sizes)


def unpack(part: Path, site: Path) -> bool:
    """Keep a part's chunk in `site`; with the last one, join and unpack them. Then `site` can be put on PYTHONPATH.
    Whether it was the last one.

    Raises:
        ValueError: a chunk is not what its manifest says, or belongs to another archive than those that are there.
    """
    chunk = Chunk(**json.loads((part / _MANIFEST).read_text(encoding="utf-8")))
    content = (part / _CHUNK).read_bytes()
    if hashlib.sha256(content).hexdigest() != chunk.sha256:
        raise ValueError(f"{part / _CHUNK} is damaged")
    folder = site / _CHUNKS / chunk.archive
    folder.mkdir(parents=True, exist_ok=True)
    if len(list(folder.parent.iterdir())) > 1:
        raise ValueError(f"{part} belongs to another archive than the chunks in {site}; remove these")
    (folder / str(chunk.index)).write_bytes(content)
    chunks = [folder / str(index) for index in range(chunk.count)]
    if not all(path.exists() for path in chunks):
        return False
    packed = b"".join(path.read_bytes() for path in chunks)
    if hashlib.sha256(packed).hexdigest() != chunk.archive:
        raise ValueError(f"the chunks in {folder} are each whole, but joined they are not the archive")
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
        # Python 3.11.2 and 3.11.3 have no filters. What is unpacked was packed here: its digest is in the manifest.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(site)
    (site / _WHOLE).touch()
    return True


def whole(site: Path) -> bool:
    """Whether all parts have been unpacked there."""
    return (site / _WHOLE).exists()


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
        with zipfile.ZipFile(wheel) as zipped:
            name = next(name for name in zipped.namelist() if name.endswith(".dist-info/METADATA"))
            text = zipped.read(name).decode(errors="replace")
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
    packing.add_argument("--call-mib", type=int, default=CALL_BYTES >> 20, help="that one call may carry")
    unpacking = commands.add_parser("unpack", help="unpack a part")
    unpacking.add_argument("part", type=Path)
    unpacking.add_argument("--to", type=Path, required=True)
    checking = commands.add_parser("whole", help="status 0 if all parts are there")
    checking.add_argument("site", type=Path)
    args = parser.parse_args(arguments)
    if args.command == "pack":
        wheels = sorted(args.wheels.glob("*.whl")) if args.wheels else download(args.to / "wheels", args.python)
        tree = tree_bytes(ROOT)
        call_bytes = args.call_mib << 20
        sizes = pack(wheels, args.to, call_bytes - tree - MARGIN)
        print(f"the working tree has {mib(tree)}, a call may carry {mib(call_bytes)}: it needs {len(sizes)} calls")
        for letter, size in zip(_LETTERS, sizes, strict=False):
            print(f"{args.to / letter}: {mib(size)}, with the tree {mib(size + tree)}")
    elif args.command == "unpack":
        print(f"{args.part}: {'the last one' if unpack(args.part, args.to) else 'others have still to come'}")
    else:
        return 0 if whole(args.site) else 1
    return 0


def mib(size: int) -> str:
    """Bytes to read."""
    return f"{size / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
