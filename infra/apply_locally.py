"""Applies infra/terraform to an AWS on this machine, runs the pipeline on what was made, and destroys it again.

    python -m infra.apply_locally [minimal] [production] [--keep-logs DIR]

For each example: init, validate, apply, a second plan, our processes with the very variables of their containers, a
file dropped into the bucket, each of their requests held against their policies, destroy, and a look whether anything
is left. Needs terraform on PATH and ministack (`make infra-apply` installs it). TERRAFORM_PLUGINS may name a folder
with the provider, where no registry can be reached. docs/deploy.md says what this shows, and what it doesn't.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from infra import pipeline_check
from infra.costs import costs, table
from infra.iam_check import Policy, denied
from infra.left_over import inventory
from infra.local_aws import REGION, LocalAws, local_aws
from infra.pipeline_check import Installation, installation
from tests.cluster.cluster import ROOT as REPOSITORY
from tests.servers.process import MissingServer

TERRAFORM: Final = REPOSITORY / "infra" / "terraform"
WEIGHTS: Final = "local-weights"
MODEL: Final = "demo"
NOT_APPLIED: Final = {
    "events.aws_cloudwatch_log_group.kafka",
    "events.aws_msk_cluster.this",
    "events.aws_msk_configuration.this",
    "events.aws_security_group.kafka",
    "events.aws_vpc_security_group_egress_rule.brokers",
    "events.aws_vpc_security_group_ingress_rule.brokers",
    "events.aws_vpc_security_group_ingress_rule.kafka",
    "observability.aws_cloudwatch_metric_alarm.kafka_disk",
}
"""Resource blocks that no example has here, each by its module: neither ministack nor moto can make an MSK cluster that
the provider reads. They are planned by `terraform test`, with a mock."""

MANY: Final = 40
"""Things that stand after any apply; a listing that sees fewer would see nothing left after destroy, too."""

PROVIDER: Final = """
provider "aws" {
  region                      = var.region
  access_key                  = "operator"
  secret_key                  = "testtest"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  s3_use_path_style           = true
}
"""

COMMON: Final[Mapping[str, Any]] = {
    "region": REGION,
    "bucket_name": "tokenmill-local",
    "force_destroy": True,
    "control_image": f"000000000000.dkr.ecr.{REGION}.amazonaws.com/tokenmill-control:local",
    "worker_image": f"000000000000.dkr.ecr.{REGION}.amazonaws.com/tokenmill-worker:local",
    "ami_id": "ami-0123456789abcdef0",
    "emails": ["ops@example.com"],
    # No listing after the first: what is found, the queue has told. And CloudWatch isn't to be waited for.
    "environment": {"TOKENMILL_BUCKET__SWEEP_INTERVAL_SECONDS": "3600", "TOKENMILL_CLOUDWATCH__INTERVAL_SECONDS": "1"},
}

VARIABLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "minimal": {
        "availability_zones": [f"{REGION}a"],
        "models": [f"{MODEL}=s3://{WEIGHTS}/demo.gguf"],
        "model_arns": [f"arn:aws:s3:::{WEIGHTS}/*"],
        "secret_recovery_days": 0,
    },
    "production": {
        "availability_zones": [f"{REGION}{zone}" for zone in "abc"],
        "weights_bucket": WEIGHTS,
        "monthly_budget": 5000,
        "kafka": None,  # see NOT_APPLIED
        "prefixes": {"incoming/": "default", "team-a/incoming/": "team-a"},
        "gateway": {
            "certificate_arn": f"arn:aws:acm:{REGION}:000000000000:certificate/local",
            "allowed_cidrs": ["10.0.0.0/8"],
            "delete_protection": False,
        },
        "fleets": {
            "chat": {
                "models": [f"{MODEL}=s3://{WEIGHTS}/demo.gguf"],
                "pools": {
                    "steady": {"purchase": "on_demand", "instance_types": ["g6.xlarge"], "max_instances": 2, "base": 1},
                    "spot": {"purchase": "spot", "instance_types": ["g6.xlarge", "g5.xlarge"], "max_instances": 6},
                },
                "scaling": {"min": 1, "max": 8},
            },
        },
    },
}


@dataclass
class Report:
    """What is told at the end. `problems`: what must not be.  `applied`: resource blocks, as `resource_blocks`."""

    lines: list[str] = field(default_factory=list)
    applied: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(f"  {line}", flush=True)

    def check(self, good: bool, line: str) -> None:
        self.say(f"{'ok' if good else 'WRONG'}: {line}")
        if not good:
            self.problems.append(line)


class Terraform:
    """One example, in a copy, so that nothing of it stays in the repository."""

    def __init__(self, example: str, folder: Path, endpoint: str) -> None:
        shutil.copytree(TERRAFORM, folder, ignore=shutil.ignore_patterns(".terraform", "*.tfstate*"))
        self.folder = folder / "examples" / example
        (self.folder / "local_override.tf").write_text(PROVIDER)
        variables = {**COMMON, **VARIABLES[example]}
        (self.folder / "local.auto.tfvars.json").write_text(json.dumps(variables))
        self._variables = {
            **os.environ,
            "AWS_ENDPOINT_URL": endpoint,
            "CHECKPOINT_DISABLE": "1",
            "TF_IN_AUTOMATION": "1",
        }
        config = self._variables.get("TF_CLI_CONFIG_FILE")
        if config and not Path(config).exists():
            del self._variables["TF_CLI_CONFIG_FILE"]

    def run(self, *arguments: str, codes: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run one command; raises `RuntimeError` with what it said."""
        done = subprocess.run(
            ["terraform", *arguments], cwd=self.folder, env=self._variables, capture_output=True, text=True, check=False
        )
        if done.returncode not in codes:
            raise RuntimeError(f"terraform {arguments[0]} ended with {done.returncode}:\n{done.stderr or done.stdout}")
        return done

    def init(self) -> None:
        plugins = os.environ.get("TERRAFORM_PLUGINS")
        self.run("init", "-no-color", *([f"-plugin-dir={plugins}"] if plugins else []))

    def outputs(self) -> dict[str, Any]:
        return {name: found["value"] for name, found in json.loads(self.run("output", "-json").stdout).items()}

    def plan_again(self) -> dict[str, Any]:
        """A second plan, as `terraform show -json` tells it."""
        self.run("plan", "-no-color", "-out=again.tfplan", "-detailed-exitcode", codes=(0, 2))
        plan: dict[str, Any] = json.loads(self.run("show", "-json", "again.tfplan").stdout)
        return plan

    @staticmethod
    def drift(plan: Mapping[str, Any]) -> list[str]:
        """What the plan would change."""
        changes = (one["change"] | {"address": one["address"]} for one in plan.get("resource_changes", []))
        return [
            f"{change['address']}: {', '.join(change['actions'])} {', '.join(_differing(change))}"
            for change in changes
            if change["actions"] not in (["no-op"], ["read"])
        ]


def _differing(change: Mapping[str, Any]) -> list[str]:
    before, after = change["before"] or {}, change["after"] or {}
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def main(argv: Sequence[str] | None = None) -> int:
    args = read_arguments(argv)
    problems: list[str] = []
    applied: set[str] = set()
    for example in args.examples:
        print(f"{example}:", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (args.keep_logs / example if args.keep_logs else Path(temporary)).absolute()
            try:
                with local_aws(folder, args.ministack) as aws:
                    report = _try_example(example, aws, folder)
                    problems += report.problems
                    applied |= report.applied
            except MissingServer as error:
                sys.exit(f"error: {error}")
    blocks = resource_blocks(TERRAFORM)
    print(f"{len(applied)} of {len(blocks)} resource blocks were applied; not: {', '.join(sorted(blocks - applied))}")
    if set(args.examples) == set(VARIABLES) and blocks - applied != NOT_APPLIED:
        problems.append("other blocks were left out than those that can't be applied here")
        print(f"WRONG: {problems[-1]}")
    print("all is well" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says; `examples` are all of them where none is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # No `choices`: with nargs="*", Python 3.11 holds the empty list against them.
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"{' or '.join(VARIABLES)}; all, unless named")
    parser.add_argument("--ministack", default="ministack", help="its command")
    parser.add_argument("--keep-logs", type=Path, help="a folder for the logs of all servers and processes")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.examples) - set(VARIABLES)):
        parser.error(f"{unknown[0]!r} is no example; there are {' and '.join(VARIABLES)}")
    args.examples = args.examples or list(VARIABLES)
    return args


def _try_example(example: str, aws: LocalAws, folder: Path) -> Report:
    report, begun = Report(), time.monotonic()
    model = _put_weights(aws)
    before = inventory(aws)
    terraform = Terraform(example, folder / "terraform", aws.endpoint)
    terraform.init()
    terraform.run("validate", "-no-color")
    terraform.run("apply", "-no-color", "-auto-approve")
    made = json.loads(terraform.run("show", "-json").stdout)
    addresses = _resources(made["values"]["root_module"])
    report.applied = {block_of(address, example) for address in addresses}
    report.say(f"applied {len(addresses)} resources in {time.monotonic() - begun:.0f} s")
    again = terraform.plan_again()
    drift = terraform.drift(again)
    report.say(
        f"a second plan would change what this API tells otherwise than it was given: {'; '.join(drift) or 'nothing'}"
    )
    for line in table(costs(again)):
        report.say(line)
    standing = inventory(aws) - before
    report.check(len(standing) > MANY, f"{len(standing)} things stand that the listing knows")
    with installation(aws, terraform.outputs(), folder / "processes") as processes:
        _try_pipeline(example, processes, model, report)
    terraform.run("destroy", "-no-color", "-auto-approve")
    left = sorted(inventory(aws) - before)
    report.check(not left, f"destroyed in {time.monotonic() - begun:.0f} s since the begin; left: {left or 'nothing'}")
    return report


def resource_blocks(folder: Path) -> set[str]:
    """All that modules and examples have, as MODULE.TYPE.NAME."""
    return {
        f"{path.parent.name}.{kind}.{name}"
        for path in folder.glob("*/*/*.tf")
        for kind, name in re.findall(r'^resource "(\w+)" "(\w+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def block_of(address: str, example: str) -> str:
    """The block that a resource's address is of. Modules are called as their folders are."""
    bare = re.sub(r'\["?[^\]]*"?\]', "", address)
    *modules, kind, name = bare.split(".")
    return ".".join((modules[-1] if modules else example, kind, name))


def _resources(module: Mapping[str, Any]) -> list[str]:
    below = [name for child in module.get("child_modules", []) for name in _resources(child)]
    return [found["address"] for found in module.get("resources", []) if found["mode"] == "managed"] + below


def _put_weights(aws: LocalAws) -> Path:
    """The demo model, as somebody would have put it into a bucket of weights; where it is on this machine."""
    from tokenmill.models import sources
    from tokenmill.settings import read_settings

    path = sources.pull(MODEL, read_settings().model_cache, print).path
    client = aws.client("s3")
    client.create_bucket(Bucket=WEIGHTS)
    client.upload_file(str(path), WEIGHTS, "demo.gguf")
    return path


def _try_pipeline(example: str, made: Installation, model: Path, report: Report) -> None:
    workers = [name for name in made.outputs["processes"] if name.startswith("worker")]
    for name in made.outputs["processes"]:
        if name != "gateway":
            made.start(name)
    made.wait(lambda: made.keys("catalog/"), "no worker is up")
    place = "incoming/" if example == "minimal" else "team-a/incoming/"
    made.wait(lambda: made.listed(place), "no intake has looked for drops")  # once; after that it hears by the queue
    begun = time.monotonic()
    job = pipeline_check.drop_a_file(made, model, MODEL, place)
    report.check(
        True,
        f"a file below {place} became job {job} by way of the queue; {pipeline_check.ROWS} right rows in Parquet "
        f"after {time.monotonic() - begun:.1f} s",
    )
    if "gateway" in made.outputs["processes"]:
        from infra.gateway_check import try_gateway

        made.start("gateway")
        report.check(True, try_gateway(made, model, MODEL))
    for name, described in made.outputs["processes"].items():
        if "health" in described:
            report.check(made.is_well(name), f"{name} is well by its container's health check")
    wished, wanted = pipeline_check.wake_from_none(made, model, MODEL, place, workers[0])
    report.check(
        wanted >= 1,
        f"with no worker, CloudWatch was told of a wish for {wished:.0f}, for which the policy starts {wanted}; it "
        "was done when one was there",
    )
    if made.outputs["processes"][workers[0]]["environment"]["TOKENMILL_SPOT_NOTICE"] == "true":
        took = pipeline_check.take_the_spot_instance(made, workers[0])
        report.check(took < 60, f"told that its instance goes, {workers[0]} ended in order after {took:.1f} s")
    for name, (code, took, allowed) in made.stop_all().items():
        report.check(
            code == 0 and took < allowed, f"{name} ended with {code} {took:.1f} s after SIGTERM ({allowed:.0f})"
        )
        if "health" in made.outputs["processes"][name]:
            report.check(not made.is_well(name), f"{name} is not well any more by it")
    _check_rights(made, report)
    report.say("helped: " + "; ".join(f"{name}: {how}" for name, how in sorted(made.helped.items())))


def _check_rights(made: Installation, report: Report) -> None:
    for name, described in made.outputs["processes"].items():
        policy = Policy(described["policy"])
        requests = [asked for asked in made.aws.asked if asked.key == name]
        missing = denied(policy, requests)
        report.check(
            bool(requests) and not missing,
            f"{name} made {len(requests)} requests, and may: {missing or 'all of them'}",
        )
        unused: dict[str, list[str]] = {}
        for action, resource in policy.unused():
            unused.setdefault(action.partition(":")[2], []).append(resource.rpartition(":")[2].partition("/")[2])
        told = "; ".join(f"{action} {' '.join(prefixes)}" for action, prefixes in unused.items())
        report.say(f"{name} was given, and did not need this time: {told or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
