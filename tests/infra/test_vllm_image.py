"""Tests of the image of workers whose engine is vLLM, from its files."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

from infra.sbom import IMAGES, NAMES, REPOSITORY, constraints_file, extras, normalized, pins

DOCKERFILE = (IMAGES / "vllm.Dockerfile").read_text(encoding="utf-8")
WORKER = (IMAGES / "worker.Dockerfile").read_text(encoding="utf-8")
PINS = pins(constraints_file("vllm").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def environment(dockerfile: str) -> dict[str, str]:
    """Variables that the image sets."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", block))


def test_given_the_image_then_it_is_the_workers_with_vllm_as_its_engine() -> None:
    assert set(extras(DOCKERFILE).split(",")) == {*extras(WORKER).split(","), "vllm"}
    packages = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= set(re.findall(r"^COPY (\w+) \w+$", DOCKERFILE, re.MULTILINE))
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    last = DOCKERFILE[DOCKERFILE.index("VOLUME") :]
    assert last == WORKER[WORKER.index("VOLUME") :]


def test_given_the_images_variables_then_it_selects_vllm_sends_no_usage_statistics_and_caches_in_its_volume() -> None:
    variables = environment(DOCKERFILE)
    assert environment(WORKER).items() <= variables.items()
    assert variables["TOKENMILL_ENGINE"] == "vllm"
    assert (variables["VLLM_NO_USAGE_STATS"], variables["DO_NOT_TRACK"]) == ("1", "1")
    caches = [value for name, value in variables.items() if re.search("CACHE|WORKSPACE", name)]
    assert len(caches) >= 5
    assert [value for value in caches if not value.startswith("/cache/")] == []


@pytest.mark.parametrize("extra", [None, *extras(DOCKERFILE).split(",")])
def test_given_the_images_packages_then_versions_are_pinned_and_allowed_by_the_project(extra: str | None) -> None:
    project = PROJECT["project"]
    for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        wanted = Requirement(line)
        assert PINS[normalized(wanted.name)] in wanted.specifier, line


def test_given_the_workers_packages_then_only_those_that_vllm_restricts_have_other_versions() -> None:
    workers = pins(constraints_file("worker").read_text(encoding="utf-8"))
    assert {name for name in PINS.keys() & workers.keys() if PINS[name] != workers[name]} == {
        "fastapi", "llguidance", "numpy", "setuptools", "transformers",
    }  # fmt: skip


def test_given_the_base_image_then_its_cuda_is_that_of_torch() -> None:
    (version,) = re.findall(r"^ARG BASE=nvidia/cuda:([\d.]+)-base-", DOCKERFILE, re.MULTILINE)
    assert PINS["cuda-toolkit"].startswith(version)


@pytest.mark.parametrize("name", NAMES)
def test_given_an_image_then_docker_gets_each_file_that_it_copies(name: str) -> None:
    copied = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    ignore = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied
    assert ignore[0] == "*"
    missing = [one for line in copied for one in line.split() if f"!{one}" not in ignore]
    assert missing == []
