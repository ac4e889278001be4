"""Applies infra/terraform to an AWS emulation on this machine, runs the pipeline on it, and destroys it again.

    python -m infra.apply_locally [minimal] [production] [--keep-logs DIR]

For each example: init, validate, apply, a second plan, tokenmill's processes with exactly the variables of their
containers, a file dropped into the bucket, a check of each process's requests against its policy, destroy, and a check
that no resource is left. Needs terraform on PATH and ministack (`make infra-apply` installs it). Without a registry,
set TERRAFORM_PLUGINS to a folder with the provider. docs/deploy.md lists the properties that this run verifies.
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
    "network.aws_security_group.kv_transfer",
    "network.aws_vpc_security_group_egress_rule.kv_transfer",
    "network.aws_vpc_security_group_ingress_rule.kv_transfer",
    "observability.aws_cloudwatch_metric_alarm.kafka_disk",
}
"""Resource blocks that no example applies here, as MODULE.TYPE.NAME: neither ministack nor moto can create an MSK
cluster that the provider can read, and no fleet here has a role. `terraform test` plans them with a mock."""

MANY: Final = 40
"""Fewest resources after an apply. A listing that finds fewer is broken, and would find none after destroy, too."""

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
    # Only one listing, so that all files are found through the queue; CloudWatch every second, to save time.
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
    """Results of one example. `problems`: checks that failed.  `applied`: resource blocks, as in `resource_blocks`."""

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
    """Terraform on a copy of one example, which keeps the repository clean."""

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
        """Run one command. Raises `RuntimeError` with its output."""
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
        """A second plan, as a `terraform show -json` document."""
        self.run("plan", "-no-color", "-out=again.tfplan", "-detailed-exitcode", codes=(0, 2))
        plan: dict[str, Any] = json.loads(self.run("show", "-json", "again.tfplan").stdout)
        return plan

    @staticmethod
    def drift(plan: Mapping[str, Any]) -> list[str]:
        """Changes that the plan would make."""
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
        problems.append("the blocks that were not applied differ from NOT_APPLIED")
        print(f"WRONG: {problems[-1]}")
    print("all checks passed" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line; `examples` holds all examples unless some are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # No `choices`: with nargs="*", Python 3.11 refuses the empty list.
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
        f"a second plan would change (this API returns other values than it got): {'; '.join(drift) or 'nothing'}"
    )
    for line in table(costs(again)):
        report.say(line)
    standing = inventory(aws) - before
    report.check(len(standing) > MANY, f"the listing finds {len(standing)} resources")
    with installation(aws, terraform.outputs(), folder / "processes") as processes:
        _try_pipeline(example, processes, model, report)
    terraform.run("destroy", "-no-color", "-auto-approve")
    left = sorted(inventory(aws) - before)
    report.check(not left, f"destroyed {time.monotonic() - begun:.0f} s after the start; left: {left or 'nothing'}")
    return report


def resource_blocks(folder: Path) -> set[str]:
    """Resource blocks of all modules and examples, as MODULE.TYPE.NAME."""
    return {
        f"{path.parent.name}.{kind}.{name}"
        for path in folder.glob("*/*/*.tf")
        for kind, name in re.findall(r'^resource "(\w+)" "(\w+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def block_of(address: str, example: str) -> str:
    """The resource block of an address. A module has the name of its folder."""
    bare = re.sub(r'\["?[^\]]*"?\]', "", address)
    *modules, kind, name = bare.split(".")
    return ".".join((modules[-1] if modules else example, kind, name))


def _resources(module: Mapping[str, Any]) -> list[str]:
    below = [name for child in module.get("child_modules", []) for name in _resources(child)]
    return [found["address"] for found in module.get("resources", []) if found["mode"] == "managed"] + below


def _put_weights(aws: LocalAws) -> Path:
    """Upload the demo model to the weights bucket; returns its path on this machine."""
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
    prefix = "incoming/" if example == "minimal" else "team-a/incoming/"
    made.wait(lambda: made.listed(prefix), "no intake has listed the prefix")  # once; later files come by the queue
    begun = time.monotonic()
    job = pipeline_check.drop_a_file(made, model, MODEL, prefix)
    report.check(
        True,
        f"a file below {prefix} became job {job} through the queue; {pipeline_check.ROWS} correct rows in Parquet "
        f"after {time.monotonic() - begun:.1f} s",
    )
    if "gateway" in made.outputs["processes"]:
        from infra.gateway_check import try_gateway

        made.start("gateway")
        report.check(True, try_gateway(made, model, MODEL))
    for name, described in made.outputs["processes"].items():
        if "health" in described:
            report.check(made.is_well(name), f"{name} passes its container's health check")
    desired, started = pipeline_check.scale_up_from_none(made, model, MODEL, prefix, workers[0])
    report.check(
        started >= 1,
        f"with no worker running, CloudWatch got {desired:.0f} desired workers, for which the policy starts {started}; "
        "the job completed once one had started",
    )
    if made.outputs["processes"][workers[0]]["environment"]["TOKENMILL_SPOT_NOTICE"] == "true":
        took = pipeline_check.take_the_spot_instance(made, workers[0])
        report.check(took < 60, f"{workers[0]} exited cleanly {took:.1f} s after its spot interruption notice")
    for name, (code, took, allowed) in made.stop_all().items():
        report.check(
            code == 0 and took < allowed,
            f"{name} exited with {code} {took:.1f} s after SIGTERM (limit {allowed:.0f})",
        )
        if "health" in made.outputs["processes"][name]:
            report.check(not made.is_well(name), f"{name} fails its health check after it has exited")
    _check_rights(made, report)
    report.say("replaced: " + "; ".join(f"{name}: {how}" for name, how in sorted(made.replaced.items())))


def _check_rights(made: Installation, report: Report) -> None:
    for name, described in made.outputs["processes"].items():
        policy = Policy(described["policy"])
        requests = [request for request in made.aws.requests if request.key == name]
        missing = denied(policy, requests)
        report.check(
            bool(requests) and not missing,
            f"{name} sent {len(requests)} requests; rights that its policy lacks: {missing or 'none'}",
        )
        unused: dict[str, list[str]] = {}
        for action, resource in policy.unused():
            unused.setdefault(action.partition(":")[2], []).append(resource.rpartition(":")[2].partition("/")[2])
        listed = "; ".join(f"{action} {' '.join(prefixes)}" for action, prefixes in unused.items())
        report.say(f"{name} did not use these rights: {listed or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
