"""Checks of the Terraform files against the code that need no Terraform."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from pipeline.scaling.autoscaler import PoolDecision
from pipeline.scaling.backlog import BacklogMetrics, ModelBacklog
from pipeline.scaling.cloudwatch import CloudWatch
from pipeline.scaling.policy import PolicyState, PoolObservation, decide
from schemas.settings.autoscaling import ScalingLimits
from schemas.settings.kv_transfer import Role
from schemas.settings.settings import Settings

TERRAFORM = Path(__file__).parents[2] / "infra/terraform"
BEYOND_SETTINGS = {"TOKENMILL_ROOT", "TOKENMILL_NATIVE_CACHE"}
"""Variables outside Settings: the root is an option of the commands, the cache the engine's."""


def named() -> set[str]:
    """TOKENMILL_ variables that any module or example sets."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in TERRAFORM.rglob("*.tf"))
    return set(re.findall(r"\bTOKENMILL_[A-Z0-9_]*[A-Z0-9]\b", text))


def test_given_the_variables_of_containers_then_each_is_a_setting() -> None:
    found = named()
    assert len(found) > 15
    assert {"TOKENMILL_BUCKET__QUEUE_URL", "TOKENMILL_KAFKA__BOOTSTRAP_SERVERS", "TOKENMILL_REDIS_URL"} <= found
    assert sorted(name for name in found - BEYOND_SETTINGS if not is_setting(name)) == []


def is_setting(variable: str) -> bool:
    model: type[BaseModel] = Settings
    *groups, last = variable.removeprefix("TOKENMILL_").lower().split("__")
    for group in groups:
        field = model.model_fields.get(group)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return False
        model = field.annotation
    return last in model.model_fields


@pytest.mark.parametrize("name", ["TOKENMILL_KAFKA__BOOTSTRAPS", "TOKENMILL_NO__SUCH", "TOKENMILL_NOTHING"])
def test_given_an_unknown_variable_then_the_check_finds_it(name: str) -> None:
    assert not is_setting(name)


def test_given_the_engines_of_a_fleet_then_they_are_those_of_the_setting() -> None:
    text = (TERRAFORM / "modules/workers/variables.tf").read_text(encoding="utf-8")
    (engines,) = re.findall(r"contains\(\[(.+)\], var\.engine\)", text)
    assert set(re.findall(r'"(\w+)"', engines)) == set(get_args(Settings.model_fields["engine"].annotation))


def test_given_the_roles_of_a_fleet_then_they_are_those_of_a_worker() -> None:
    text = (TERRAFORM / "modules/workers/variables.tf").read_text(encoding="utf-8")
    (roles,) = re.findall(r"contains\(\[(.+)\], var\.role\)", text)
    assert set(re.findall(r'"(\w+)"', roles)) == set(get_args(Role))


def test_given_the_examples_then_both_pin_the_same_provider() -> None:
    versions = {path: path.read_text(encoding="utf-8") for path in TERRAFORM.glob("examples/*/versions.tf")}
    pins = {
        path.parent.name: re.findall(r'^ +version += "(.+)"', text, re.MULTILINE) for path, text in versions.items()
    }
    assert pins == {"minimal": ["5.100.0"], "production": ["5.100.0"]}


def test_given_checkov_waivers_then_each_has_a_reason() -> None:
    waivers = [
        line.strip()
        for path in TERRAFORM.rglob("*.tf")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "checkov:skip" in line
    ]
    assert waivers
    assert [line for line in waivers if not re.match(r"# checkov:skip=CKV2?_AWS_\d+:.{8,}", line)] == []


@pytest.mark.slow
def test_given_metrics_in_alarms_and_graphs_then_the_adapter_emits_them_with_those_dimensions() -> None:
    decided = PoolDecision("gpu", PoolObservation(), decide(ScalingLimits(), PolicyState(), PoolObservation(), 0.0))
    requests: list[Any] = []

    class Client:
        def put_metric_data(self, **request: Any) -> None:
            requests.append(request)

    cloudwatch = CloudWatch("space", "here", "us-east-1")
    cloudwatch._client = Client()
    cloudwatch.put(BacklogMetrics(1, (ModelBacklog("m", 1, 1, 1.0),)), [decided])
    emitted = {
        (one["MetricName"], frozenset(dimension["Name"] for dimension in one["Dimensions"]))
        for one in requests[0]["MetricData"]
    }
    text = "\n".join(path.read_text(encoding="utf-8") for path in TERRAFORM.glob("modules/*/*.tf"))
    named = {
        (name, frozenset(re.findall(r"(\w+) +=", dimensions)))
        for name, dimensions in re.findall(
            r'namespace += var\.metric_namespace\n +metric_name += "(\w+)"\n +dimensions += \{ (.+?) \}\n', text
        )
    }
    named |= {
        (name, frozenset(re.findall(r'"(\w+)", [\w.]+', dimensions)))
        for name, dimensions in re.findall(r'\[var\.metric_namespace, "(\w+)", (.+?), \{ label', text)
    }
    assert {name for name, _ in named} == {
        "OpenJobs", "BacklogSeconds", "BacklogTokens", "TokensPerSecond", "Workers", "DesiredWorkers",
    }  # fmt: skip
    assert named <= emitted
