"""Builds the kernels of an instruction set once, with the available C++ compiler, into a cache keyed by all inputs of
the build.

The library needs no headers of torch's: it binds by ctypes, and shares torch's OpenMP threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from engine.logs import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "csrc"

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_DOTS = (*_AVX512, "avx512_bf16", "avx512_vnni")

INSTRUCTION_SETS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": _AVX512,
    "avx512_bf16": _DOTS,
    "amx": (*_DOTS, "amx_tile", "amx_bf16", "amx_int8"),
}
"""Name -> the processor's features that its kernels use, as /proc/cpuinfo names them, from the least to the most."""

_OPTIONS = {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni"}
"""Features that compilers name otherwise."""

_COMMON = ("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math", "-w")
_DRIVER = ("-O2", "-std=c++17", "-fPIC", "-fopenmp")
_SECONDS = 300


class NativeUnavailable(Exception):
    """Raised when the native kernels can't be used here; names the reason and the remedy."""


def default_cache() -> Path:
    """Return the folder of built libraries: TOKENMILL_NATIVE_CACHE, or tokenmill/native in the user's cache folder."""
    if folder := os.environ.get("TOKENMILL_NATIVE_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenmill" / "native"


def find_compiler() -> list[str]:
    """Return the C++ compiler's command: CXX, or the first installed one of g++, c++, clang++.

    Raises:
        NativeUnavailable: there is none.
    """
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise NativeUnavailable("no C++ compiler is installed; install g++, or name one in CXX")


def build(instruction_set: str, cache: Path | None = None) -> Path:
    """Return the path of an instruction set's library, built now if it is not cached. Without a compiler, any
    compiler's cached build is used.

    Raises:
        NativeUnavailable: this is no x86-64 Linux, the processor lacks the instruction set, there is no compiler, or it
            fails.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NativeUnavailable(f"the native kernels are for x86-64 Linux, not {sys.platform} on {os.uname().machine}")
    if instruction_set not in processor_sets():
        raise NativeUnavailable(f"this processor has no {instruction_set}")
    cache = cache or default_cache()
    name = f"kernels-{instruction_set}-{_sources_key()}"
    try:
        compiler = find_compiler()
    except NativeUnavailable:
        if found := list(cache.glob(f"{name}-*.so")):
            return max(found, key=lambda path: path.stat().st_mtime)
        raise
    library = cache / f"{name}-{_key([_run([*compiler, '--version']), *compiler])}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache):
            if library.exists():
                return library
            logger.info("compiling the kernels, once for this processor", notice=True, instruction_set=instruction_set)
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
                built = _compile(compiler, instruction_set, Path(folder))
                built.replace(library)  # atomic, because a process without the lock may build it at the same time
    except OSError as error:
        raise NativeUnavailable(
            f"can't build in {cache}: {error.strerror or error}; set TOKENMILL_NATIVE_CACHE to a folder with room"
        ) from error
    return library


def processor_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has, from the least to the most."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    features = {feature for line in lines if line.startswith("flags") for feature in line.partition(":")[2].split()}
    return [name for name, needed in INSTRUCTION_SETS.items() if features.issuperset(needed)]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the cache, so that of several processes one compiles and the others wait for its library."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Without locks, as on some network file systems, each process compiles for itself.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sources() -> list[Path]:
    return sorted(SOURCES.iterdir())


def _sources_key() -> str:
    """Return the hash of the build's inputs: sources, flags and torch."""
    sources = (part for source in _sources() for part in (source.name, source.read_text(encoding="utf-8")))
    return _key([*sources, repr(INSTRUCTION_SETS), repr(_OPTIONS), repr(_COMMON + _DRIVER), torch.__version__])


def _key(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:12]


def _compile(compiler: list[str], instruction_set: str, folder: Path) -> Path:
    features = [
        f"-m{_OPTIONS.get(feature, feature.replace('_', '-'))}" for feature in INSTRUCTION_SETS[instruction_set]
    ]
    index = list(INSTRUCTION_SETS).index(instruction_set)
    jobs = [
        [*compiler, *_COMMON, *features, "-c", str(SOURCES / "kernels.cpp")],
        [*compiler, *_DRIVER, f"-DINSTRUCTION_SET={index}", "-c", str(SOURCES / "driver.cpp")],
    ]
    objects = [folder / f"{index}.o" for index in range(len(jobs))]
    _run(*([*job, "-o", str(to)] for job, to in zip(jobs, objects, strict=True)))
    library = folder / "kernels.so"
    # torch's own folder first: its OpenMP must be ours too, or there would be two pools of threads.
    torch_libraries = Path(torch.__file__).parent / "lib"
    _run([
        *compiler, "-shared", "-fopenmp", *map(str, objects), f"-L{torch_libraries}", "-ltorch_cpu",
        "-Wl,--allow-shlib-undefined", "-o", str(library),
    ])  # fmt: skip
    return library


def _run(*commands: list[str]) -> str:
    """Run commands of a compiler at the same time; return their output."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
            )
        return "".join(_output(process) for process in running)
    except OSError as error:
        raise NativeUnavailable(f"the compiler {command[0]} does not run: {error}") from error
    finally:
        for process in running:
            with process:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started, which would compile on without it


def _output(process: subprocess.Popen[str]) -> str:
    assert isinstance(process.args, list)
    compiler = process.args[0]
    try:
        output, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"the compiler {compiler} was not done after {_SECONDS} seconds") from error
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line.lower()] or errors.splitlines()
        raise NativeUnavailable(f"the compiler {compiler} failed: {lines[0] if lines else 'without a word'}")
    return output
