"""Environments and forms of the model: made once, taken up again after a failure, refused with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.peers import catalog
from benchmarks.peers.catalog import Environment
from benchmarks.peers.environments import Unavailable, find_libraries, first_error, last_line, prepare, run_step
from benchmarks.peers.forms import Forms, identity
from engine import Engine, EngineConfig


def quiet(_: str) -> None:
    """A `say` callback that discards the message."""


def project(folder: Path, version: str) -> Path:
    """A package that pip can install without an index: one module, built by nothing but the standard library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "speedy"\nversion = "{version}"\n',
        encoding="utf-8",
    )
    (folder / "backend.py").write_text(
        "import zipfile\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
        f"    name, info = 'speedy-{version}-py3-none-any.whl', 'speedy-{version}.dist-info'\n"
        "    with zipfile.ZipFile(f'{folder}/{name}', 'w') as wheel:\n"
        f"        wheel.writestr('speedy.py', 'version = \"{version}\"')\n"
        "        head = 'Metadata-Version: 2.1\\nName: speedy\\n'\n"
        f"        wheel.writestr(f'{{info}}/METADATA', head + 'Version: {version}\\n')\n"
        "        wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        wheel.writestr(f'{info}/RECORD', '')\n"
        "    return name\n",
        encoding="utf-8",
    )
    return folder


def install(root: Path, *packages: str, torch: str = "") -> Path:
    return prepare(
        Environment("peer", packages, torch=bool(torch)), root, torch, threads=1, limit=120, say=quiet,
        pip_args=("--no-index", "--no-build-isolation"),
    )  # fmt: skip


@pytest.mark.exhaustive
def test_an_environment_is_its_own_installed_once_and_again_when_its_packages_change(tmp_path: Path) -> None:
    first, second = project(tmp_path / "one", "1.0"), project(tmp_path / "two", "2.0")

    def version(python: Path) -> str:
        command = [str(python), "-c", "import speedy; print(speedy.version)"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    python = install(tmp_path / "envs", str(first))
    assert version(python) == "1.0"
    stamped = (tmp_path / "envs" / "peer" / "installed.json").stat().st_mtime_ns

    assert install(tmp_path / "envs", str(first)) == python
    assert (tmp_path / "envs" / "peer" / "installed.json").stat().st_mtime_ns == stamped
    install(tmp_path / "envs", str(second))
    assert version(python) == "2.0"


@pytest.mark.exhaustive
def test_what_cant_be_installed_has_a_reason_and_torch_comes_before_all_else(tmp_path: Path) -> None:
    """Given a torch that there is not, nothing is installed that could bring another, and no stamp calls it done."""
    with pytest.raises(Unavailable, match=r"installing peer: ERROR: (No matching distribution|ResolutionImpossible)"):
        install(tmp_path / "envs", str(project(tmp_path / "one", "1.0")), torch="torch==0.0.1")

    folder = tmp_path / "envs" / "peer"
    found = subprocess.run([str(folder / "bin" / "python"), "-c", "import speedy"], stderr=subprocess.PIPE, check=False)
    assert b"No module named 'speedy'" in found.stderr
    assert not (folder / "installed.json").exists()


@pytest.mark.slow
def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="waiting: not done after 1 s"):
        run_step([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log", 1, "waiting")


def test_the_reason_is_the_last_line_that_speaks_of_an_error() -> None:
    assert last_line("ok\nValueError: too large\n  notice: a new release\n") == "ValueError: too large"
    assert last_line("one\ntwo\n\n") == "two"
    assert last_line("") == "no output"


def test_the_cause_is_the_first_exception_of_several() -> None:
    log = "(Worker) ERROR [run.py:9] ValueError: 18 GiB are free, 19 wanted\nRuntimeError: failed, see above\n"

    assert first_error(log) == "ValueError: 18 GiB are free, 19 wanted"
    assert first_error("ERROR: something\nkilled\n") is None


def test_libraries_are_looked_for_in_the_environment_first(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()

    assert find_libraries(("libiomp5.so",), tmp_path / "bin" / "python") == [library]
    with pytest.raises(Unavailable, match=r"libnothing\.so\.9: not installed"):
        find_libraries(("libiomp5.so", "libnothing.so.9"), tmp_path / "bin" / "python")


def forms(tmp_path: Path, model: Path, gguf: Path | None = None) -> Forms:
    """Forms whose every environment is this one: enough for tools that are scripts of ours."""
    return Forms(model, tmp_path / "forms", lambda _: Path(sys.executable), 60, gguf)


def test_a_folder_of_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    assert forms(tmp_path, model).path(catalog.SAFETENSORS) == model


def test_llamacpp_without_a_gguf_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    with pytest.raises(Unavailable, match="--gguf"):
        forms(tmp_path, model).path(catalog.GGUF_Q8_0)


def test_a_form_is_made_once_from_the_form_before_it(tmp_path: Path) -> None:
    """Given a tool that copies its source and logs calls, Q8_0 is made from bf16, that from the model, each once."""
    tool, calls = tmp_path / "tool", tmp_path / "calls"
    tool.write_text(f'#!/bin/sh\necho "$5" >> {calls}\n(cat "$3"; printf "%s" " $5") > "$4"\n', encoding="utf-8")
    tool.chmod(0o755)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    model_forms = Forms(model, tmp_path / "forms", lambda _: tool, 60)

    made = [model_forms.path(form) for form in (catalog.GGUF_Q8_0, catalog.GGUF_BF16, catalog.GGUF_Q8_0)]

    assert [path.read_bytes() for path in made] == [b"weights BF16 Q8_0", b"weights BF16", b"weights BF16 Q8_0"]
    assert calls.read_text(encoding="utf-8").split() == ["BF16", "Q8_0"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_w8a8_form_is_a_checkpoint_that_our_engine_reads(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    made = forms(tmp_path, tiny_model("llama")).path(catalog.W8A8)

    config = json.loads((made / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "int-quantized")
    assert Engine.load(made, EngineConfig(dtype="float32")).spec.vocab_size > 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_form_that_fails_leaves_nothing_that_could_be_taken_for_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")

    with pytest.raises(Unavailable, match=f"making {catalog.SAFETENSORS}"):
        forms(tmp_path, broken).path(catalog.SAFETENSORS)

    assert not (tmp_path / "forms" / identity(broken) / catalog.SAFETENSORS).exists()


def test_other_weights_of_the_same_name_are_another_model(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"one")
    before = identity(model)
    os.utime(model, ns=(1, 1))

    assert identity(model) != before
