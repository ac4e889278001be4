"""The kernels are built once, by whatever compiler there is; where they can't be, torch's operators serve."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.native.build import INSTRUCTION_SETS, NativeUnavailable, build, default_cache
from engine.native.choice import native_library
from engine.native.library import CHOICES, NativeLibrary, load_library
from tests.waiting import HANG_SECONDS, wait_for

CPU = torch.device("cpu")
FAST = EngineConfig(dtype="float32", threads=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that everything here builds into."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(folder))
    return folder


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real compiler without optimizations: seconds instead of half a minute. Returns the log of its calls."""
    real = shutil.which("g++") or shutil.which("clang++")
    assert real is not None
    wrapper = tmp_path / "quick-c++"
    log = tmp_path / "compiled"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {real} "$@" -O0\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


@pytest.fixture
def logged() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as logs:
        yield logs
    structlog.reset_defaults()


def test_without_a_compiler_torchs_operators_serve_and_it_is_said_once(
    cache: Path, no_compiler: None, tiny_model: Callable[[str], Path], logged: list[dict[str, object]]
) -> None:
    engine = Engine.load(tiny_model("llama"), FAST)
    assert engine.attention_name == "paged-sdpa"
    (warning,) = [entry for entry in logged if "torch's operators serve" in str(entry["event"])]
    assert warning["log_level"] == "warning"
    assert warning["reason"] == "no C++ compiler is installed; install g++, or name one in CXX"


@pytest.mark.parametrize(
    ("option", "value"), [("attention", "native"), ("instruction_set", "avx2"), ("kv_dtype", "int8")]
)
def test_what_needs_the_kernels_is_refused_without_a_compiler(
    option: str, value: str, cache: Path, no_compiler: None, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(
        EngineError, match=rf"^{option} '{value}' is not available here: no C\+\+ compiler is installed"
    ):
        Engine.load(tiny_model("llama"), EngineConfig(dtype="float32", threads=1, **{option: value}))


@pytest.mark.parametrize(("option", "value"), [("instruction_set", "avx2"), ("kv_dtype", "int8")])
def test_options_that_need_the_kernels_are_refused_with_another_backend(option: str, value: str) -> None:
    config = EngineConfig(attention="paged-sdpa", **{option: value})
    with pytest.raises(
        EngineError, match=f"{option} '{value}' is of the native kernels, but attention is 'paged-sdpa'"
    ):
        native_library(config, torch.float32, CPU)
    assert native_library(EngineConfig(attention="paged-sdpa"), torch.float32, CPU) is None


def test_a_dtype_that_the_kernels_lack_is_torchs(logged: list[dict[str, object]]) -> None:
    assert native_library(EngineConfig(), torch.float16, CPU) is None
    assert "not torch.float16" in str(logged[0]["reason"])
    with pytest.raises(EngineError, match=r"attention 'native' is not available here: .* not torch\.float16"):
        native_library(EngineConfig(attention="native"), torch.float16, CPU)


def test_a_compiler_failure_reports_its_first_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, object]]
) -> None:
    monkeypatch.setenv("CXX", "g++ -include /nowhere/missing.h")
    with pytest.raises(NativeUnavailable, match=r"the compiler g\+\+ failed: .*error: /nowhere/missing\.h: No such"):
        build("avx2")
    assert [(entry["event"], entry["notice"]) for entry in logged] == [
        ("compiling the kernels, once for this processor", True)
    ]
    assert list(cache.iterdir()) == []  # nothing half-built stays
    with pytest.raises(
        EngineError, match=r"attention 'native' is not available here: the compiler g\+\+ failed: .*missing"
    ):
        native_library(EngineConfig(attention="native"), torch.float32, CPU)


def test_a_compiler_that_is_not_there_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -march=native")
    with pytest.raises(NativeUnavailable, match=r"the compiler /nowhere/c\+\+ does not run"):
        build("avx2")


@pytest.mark.exhaustive
def test_what_was_built_is_taken_again_and_needs_no_compiler(
    cache: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch, logged: list[dict[str, object]]
) -> None:
    # Given a library that was built
    first = build("avx2")
    assert [file.name for file in cache.iterdir()] == [first.name]
    made = first.stat().st_mtime_ns
    # When it is requested again, then it is that one, also where there is no compiler any more
    assert build("avx2") == first
    assert [entry["event"] for entry in logged] == ["compiling the kernels, once for this processor"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert build("avx2") == first
    assert first.stat().st_mtime_ns == made
    assert NativeLibrary(first, "avx2", 1).panel == 16
    # but what other sources became is not taken
    first.rename(cache / "kernels-avx2-0123456789ab-0123456789ab.so")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        build("avx2")


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(tmp_path / "file"))
    why = rf"can't build in {tmp_path}/file: .*; set TOKENMILL_NATIVE_CACHE to a folder with room"
    with pytest.raises(NativeUnavailable, match=why):
        build("avx2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailable, match="Permission denied; set TOKENMILL_NATIVE_CACHE"):
        build("avx2")


def _build_and_load(barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    results.put((str(build("avx2")), load_library("avx2", 1).panel))  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_of_two_processes_that_build_at_once_one_compiles_and_both_get_its_library(
    cache: Path, quick_compiler: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    builders = [spawn.Process(target=_build_and_load, args=(barrier, results)) for _ in range(2)]
    for builder in builders:
        builder.start()
    got = [results.get(timeout=HANG_SECONDS) for _ in builders]
    for builder in builders:
        builder.join(HANG_SECONDS)
    assert got[0] == got[1]
    assert [str(file) for file in cache.iterdir()] == [got[0][0]]
    assert quick_compiler.read_text().count("-shared") == 1


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    # Given a library with the same functions whose structs have other sizes
    names = ("supported", "panel", "pack", "plan", "plan_groups", "plan_shared_rows", "plan_free", "forward", "linear")
    functions = "".join(f"int tm_{name}(void) {{ return 1; }}\n" for name in (*names, "argmax", "attend", "abi"))
    (tmp_path / "other.c").write_text(functions)
    subprocess.run(["gcc", "-shared", "-fPIC", "other.c", "-o", "other.so"], cwd=tmp_path, check=True)
    with pytest.raises(NativeUnavailable, match=r"other\.so: was built from other sources; remove it"):
        NativeLibrary(tmp_path / "other.so", "avx2", 1)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.so").write_bytes(b"\x7fELF")
    with pytest.raises(NativeUnavailable, match=r"the built kernels don't load: .*torn"):
        NativeLibrary(tmp_path / "torn.so", "avx2", 1)


NEEDED = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512f", "avx512_bf16", "avx512_vnni"},
    "amx": {"amx_bf16", "amx_int8"},
}


def _sets_of_this_processor() -> list[str]:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    return [name for name, needed in NEEDED.items() if needed <= set(flags)]


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_an_instruction_set_is_loaded_or_refused_by_name(name: str) -> None:
    assert set(NEEDED) == set(CHOICES) - {"auto"} == set(INSTRUCTION_SETS)
    if name in _sets_of_this_processor():
        assert load_library(name, 1).name == name
        return
    with pytest.raises(NativeUnavailable, match=f"this processor has no {name}"):
        load_library(name, 1)
    with pytest.raises(EngineError, match=f"instruction_set '{name}' is not available here: this processor has no"):
        native_library(EngineConfig(instruction_set=name), torch.float32, CPU)


def test_auto_is_the_best_instruction_set() -> None:
    assert load_library("auto", 1).name == _sets_of_this_processor()[-1]


def test_without_a_compiler_the_best_instruction_set_that_is_cached_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(build("avx2"), tmp_path)
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert load_library("auto", 1).name == "avx2"


def test_an_unknown_instruction_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(NativeUnavailable, match="no instruction set 'sse9'; choose one of auto, avx2, avx512"):
        load_library("sse9", 1)


def test_without_help_from_the_environment_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    for name in ("TOKENMILL_NATIVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache() == Path("/home/u/.cache/tokenmill/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache() == Path("/x/tokenmill/native")
    monkeypatch.setenv("TOKENMILL_NATIVE_CACHE", "/n")
    assert default_cache() == Path("/n")


def test_a_compiler_that_takes_too_long_is_stopped_with_what_it_started(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    compiler = tmp_path / "endless-c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\nsleep {HANG_SECONDS} &\necho $! >>{started}\nwait\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("engine.native.build._SECONDS", 0.5)
    with pytest.raises(NativeUnavailable, match=r"was not done after 0\.5 seconds"):
        build("avx2")
    children = started.read_text().split()
    assert children
    wait_for(lambda: not any(_is_running(child) for child in children))


def _is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
