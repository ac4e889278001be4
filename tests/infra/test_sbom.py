"""Tests of the checks on the images' bills of materials."""

from __future__ import annotations

from typing import Any

import pytest

from infra.sbom import IMAGES, NAMES, extras, pins, problems, unlicensed

WANTED = pins("# versions\nPyArrow==26.0.1\ntyping_extensions==4.15.0\ntorch==2.13.0\n")


def component(name: str, version: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"} | more


def bill(*components: dict[str, Any]) -> dict[str, Any]:
    return {"components": list(components)}


def test_given_packages_as_they_are_pinned_then_all_is_well_however_their_names_are_written() -> None:
    held = bill(component("pyarrow", "26.0.1"), component("typing-extensions", "4.15.0"), component("pip", "1"))
    assert problems("control", held, WANTED) == []


def test_given_a_local_build_of_torch_and_what_it_brings_then_the_public_version_counts_in_the_worker_only() -> None:
    held = bill(component("torch", "2.13.0+cpu"), component("nvidia-cublas", "13.1"))
    assert problems("worker", held, WANTED) == []
    assert problems("control", held, WANTED) == ["the control side has torch"]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (bill(component("pyarrow", "27.0.0")), "pyarrow is 27.0.0, and pinned to 26.0.1"),
        (bill(component("left-pad", "1.0")), "left-pad 1.0 is not pinned"),
        (bill({"name": "pyarrow", "version": "26.0.1"}), "it has no package URL"),
        (bill(component("pip", "26.0")), "it has no components"),
        ({}, "it has no components"),
    ],
)
def test_given_a_wrong_bill_then_its_problem_is_reported(held: dict[str, Any], message: str) -> None:
    (problem,) = problems("control", held, WANTED)
    assert message in problem


def test_given_licences_then_packages_without_one_are_named() -> None:
    licensed = component("a", "1", licenses=[{"license": {"id": "MIT"}}])
    assert unlicensed(bill(licensed, component("b", "1"), component("c", "1", licenses=[]))) == ["b", "c"]


def test_given_the_images_then_their_extras_are_read() -> None:
    found = {name: extras((IMAGES / f"{name}.Dockerfile").read_text(encoding="utf-8")) for name in NAMES}
    assert "engine" not in found["control"].split(",")
    assert "engine" in found["worker"].split(",")
    with pytest.raises(ValueError, match="no"):
        extras("FROM scratch")
