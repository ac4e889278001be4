"""Lets torch's build for CUDA compute on a CPU without CUDA: `python tests/cuda_stand_ins.py SITE-PACKAGES`.

The package index has some versions of torch for Linux only with CUDA, whose libraries are gigabytes that a CPU does
not need. But torch's own libraries link to them, and can't be loaded without. So each missing library is replaced by a
small compiled one with its name and symbols, whose calls return "no device". For tests on a CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

Symbols = dict[str, set[str]]
"""Version -> names; "" is no version."""

_PARTS = "cudart|cublas|cublasLt|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cusparseLt|nccl|nvshmem"
_FOREIGN = re.compile(rf"lib({_PARTS})[._]")
_UNVERSIONED = re.compile(r"nccl|curand|cusparseLt|cuFile|nvshmem|_Z\w*nvshmem")
_ANY = "libcudart.so.13"
"""The library for symbols without a version; any library of the process will do."""

_NO_DEVICE = ("int NAME(void)", "return 100;")  # cudaErrorNoDevice
_SUCCESS = ("int NAME(void)", "return 0;")  # what registers kernels while torch is loaded
_SPECIAL = {
    "cudaGetErrorString": ("const char *NAME(int e)", 'return "no CUDA here";'),
    "cudaGetErrorName": ("const char *NAME(int e)", 'return "cudaErrorNoDevice";'),
    "cudaGetDeviceCount": ("int NAME(int *count)", "*count = 0; return 100;"),
    "cudaDriverGetVersion": ("int NAME(int *version)", "*version = 0; return 0;"),
    "cudaRuntimeGetVersion": ("int NAME(int *version)", "*version = 13000; return 0;"),
    "__cudaRegisterFatBinary": ("void **NAME(void *binary)", "static void *handle; return &handle;"),
}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def missing(folder: Path) -> dict[str, Symbols]:
    """The symbols that the libraries in `folder` need of each foreign library that they link to."""
    libraries = sorted(map(str, folder.glob("*.so*")))
    found: dict[str, Symbols] = {}
    files: dict[str, str] = {}
    for library in libraries:
        for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library)):
            if _FOREIGN.match(name):
                found.setdefault(name, defaultdict(set))
        files |= {version: file for file, version in versions(library) if file in found}
    for library in libraries:
        for line in output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in files:
                found[files[version]][version].add(name)
            elif not version and _UNVERSIONED.match(name):
                found[_ANY][""].add(name)
    return found


def versions(library: str) -> list[tuple[str, str]]:
    """File and version of each versioned library that a library needs."""
    found, file = [], ""
    for line in output("readelf", "-W", "--version-info", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            found.append((file, match[1]))
    return found


def compile_library(name: str, symbols: Symbols, folder: Path) -> None:
    """A library of this name, in `folder`."""
    lines, script = [], []
    for version, names in sorted(symbols.items()):
        for symbol in sorted(names):
            head, body = _SPECIAL.get(symbol, _SUCCESS if symbol.startswith("__cuda") else _NO_DEVICE)
            head = head.replace("NAME", f"f{len(lines)}")
            lines.append(f'{head} __asm__("{symbol}"); {head} {{ {body} }}')
        if version:
            script.append(f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(names))} }};")
    with tempfile.TemporaryDirectory() as build_folder:
        source, versions_ = Path(build_folder, "stand_in.c"), Path(build_folder, "versions")
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        versions_.write_text("\n".join(script) + "\n", encoding="utf-8")
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run([*command, *([f"-Wl,--version-script={versions_}"] if script else [])], check=True)


def main() -> int:
    """See the module's text."""
    folder = Path(sys.argv[1]) / "torch" / "lib"
    if not (folder / "libtorch_cuda.so").exists():
        print("this torch is for CPUs: nothing to do")
        return 0
    found = {name: symbols for name, symbols in missing(folder).items() if not (folder / name).exists()}
    for name, symbols in sorted(found.items()):
        compile_library(name, symbols, folder)
    print(f"stand-ins for {', '.join(sorted(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
