"""The import contracts between packages, and the contents of the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = {"tokenmill", "workers", "pipeline", "engine", "schemas"}


@pytest.mark.slow
def test_given_the_import_contracts_when_they_are_checked_then_all_are_kept() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"

    done = subprocess.run([lint_imports, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.slow
def test_given_the_control_side_when_it_is_imported_then_torch_stays_out_of_the_process() -> None:
    names = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for package in ("pipeline", "schemas")
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    ]
    script = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    script += "found = {'torch', 'transformers', 'engine', 'workers', 'tokenmill'} & set(sys.modules)\n"
    script += "sys.exit(f'imported: {sorted(found)}' if found else 0)"

    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_given_a_worker_when_it_is_imported_then_no_modelling_code_and_no_server_is() -> None:
    """Transformers' modelling code takes two seconds and 200 MB, FastAPI a quarter of a second, of every worker."""
    script = "import sys, tokenmill.services.worker\n"
    script += "found = {'transformers.modeling_utils', 'fastapi', 'uvicorn'} & set(sys.modules)\n"
    script += "sys.exit(f'imported: {sorted(found)}' if found else 0)"

    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as a user would get it, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(REPOSITORY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("tokenmill-*.whl")))


@pytest.mark.slow
def test_given_the_wheel_when_it_is_opened_then_it_holds_the_five_packages_and_nothing_else(
    wheel: zipfile.ZipFile,
) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


@pytest.mark.slow
def test_given_the_wheel_when_it_is_compared_with_the_tree_then_no_module_is_missing(wheel: zipfile.ZipFile) -> None:
    here = {
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in REPOSITORY.glob(f"{package}/**/*.py")
    }

    assert here <= set(wheel.namelist())


@pytest.mark.slow
def test_given_the_wheel_when_its_metadata_is_read_then_licence_and_command_are_there(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))

    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "tokenmill = tokenmill.__main__:main" in wheel.read(entry_points).decode()
