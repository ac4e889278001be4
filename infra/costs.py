"""Computes the hourly cost of an idle installation, by module, and of each machine that a worker pool adds.

    terraform show -json [PLANFILE] | python -m infra.costs

Reads a plan or a state. Counts charges by the hour or by the month for resources that exist, not charges by use: S3's
requests and storage, data transfer, balancer capacity units, log volume, SQS's requests, CloudWatch's metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schemas.prices import PriceBookError, read_price_book

HOURS_A_MONTH: Final = 730
PRICES: Final = json.loads(Path(__file__).with_name("prices.json").read_text(encoding="utf-8"))
"""Prices of AWS's services."""
BOOK: Final = read_price_book()
"""Prices of worker machines. The pipeline computes the costs of jobs from the same book."""
_FREE_DISK_GIB: Final = 20


class UnknownPrice(Exception):
    """Raised when a machine type or a service has no price. The message names it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars per hour of one resource. part: the module.  each: the cost is one machine's, of a pool that has none
    while idle and `max_count` at most."""

    part: str
    what: str
    dollars: float
    each: bool = False
    max_count: int = 1


def costs(document: Mapping[str, Any]) -> list[Cost]:
    """Costs of all resources in a `terraform show -json` document. Raises `UnknownPrice`."""
    values = document.get("planned_values") or document["values"]
    resources = {one["address"]: one for one in _resources(values["root_module"]) if one["mode"] == "managed"}
    found = []
    for address, one in resources.items():
        if one["type"] == "aws_vpc_endpoint":
            zones = len(one["values"].get("subnet_ids") or ()) or _planned_zones(document, resources)
            found += _endpoint(address, one["values"], zones)
        else:
            found += _of(address, one.get("values", {}), one["type"], resources)
    return found


def table(found: list[Cost]) -> list[str]:
    """Lines of a Markdown table: each module, their sum, and the cost of each machine in a pool."""
    standing: dict[str, list[Cost]] = {}
    for cost in found:
        if not cost.each:
            standing.setdefault(cost.part, []).append(cost)
    lines = ["| part | $ an hour | of |", "|---|---|---|"]
    for part in sorted(standing):
        of = ", ".join(sorted({one.what for one in standing[part]}))
        lines.append(f"| {part} | {sum(one.dollars for one in standing[part]):.3f} | {of} |")
    lines.append(f"| all, with no worker | {sum(one.dollars for one in found if not one.each):.3f} | |")
    lines += [
        f"| each machine of {one.part} | {one.dollars:.3f} | {one.what}; {one.max_count} at most |"
        for one in found
        if one.each
    ]
    return lines


def _resources(module: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from module.get("resources", [])
    for child in module.get("child_modules", []):
        yield from _resources(child)


def _endpoint(address: str, values: Mapping[str, Any], zones: int | None) -> Iterator[Cost]:
    if values["vpc_endpoint_type"] == "Interface":
        if zones is None:
            raise UnknownPrice(f"{address}: its number of zones is only known after apply")
        yield Cost(address.split(".")[1], "interface endpoints", zones * _hourly("interface_endpoint_zone"))


def _planned_zones(document: Mapping[str, Any], resources: Mapping[str, Any]) -> int | None:
    """Zones of the interface endpoints in a first plan, which holds the number of subnets but not their ids."""
    calls = document.get("configuration", {}).get("root_module", {}).get("module_calls", {})
    network = calls.get("network", {})
    given = network.get("expressions", {}).get("endpoint_zones")
    if given is None:
        given = {
            "constant_value": network.get("module", {}).get("variables", {}).get("endpoint_zones", {}).get("default")
        }
    limit = given.get("constant_value")
    subnets = sum(1 for address in resources if ".aws_subnet.private[" in address)
    return None if limit is None or not subnets else min(int(limit), subnets)


def _of(address: str, values: Mapping[str, Any], kind: str, all_of_them: Mapping[str, Any]) -> Iterator[Cost]:
    part = address.split(".")[1] if address.startswith("module.") else "root"
    if kind == "aws_nat_gateway":
        yield Cost(part, "NAT", _hourly("nat_gateway"))
    elif kind == "aws_eip":
        yield Cost(part, "NAT", _hourly("public_ipv4"))
    elif kind == "aws_lb":
        yield Cost(part, "balancer", _hourly("load_balancer"))
    elif kind == "aws_ecs_service" and ".aws_ecs_service.this[" in address:
        task = all_of_them[address.replace("aws_ecs_service", "aws_ecs_task_definition")]["values"]
        yield Cost(part, "Fargate", values["desired_count"] * _task(task))
    elif kind == "aws_elasticache_replication_group":
        yield Cost(part, values["node_type"], values["num_cache_clusters"] * _hourly(values["node_type"]))
    elif kind == "aws_msk_cluster":
        group = values["broker_node_group_info"][0]
        disk = group["storage_info"][0]["ebs_storage_info"][0]["volume_size"] * _monthly("kafka_gib")
        yield Cost(
            part, group["instance_type"], values["number_of_broker_nodes"] * (_hourly(group["instance_type"]) + disk)
        )
    elif kind == "aws_kms_key":
        yield Cost(part, "key", _monthly("kms_key"))
    elif kind == "aws_secretsmanager_secret":
        yield Cost(part, "secret", _monthly("secret"))
    elif kind == "aws_cloudwatch_metric_alarm":
        metrics = sum(1 for query in values.get("metric_query") or [] if query.get("metric")) or 1
        yield Cost(part, "alarms", metrics * _monthly("alarm_metric"))
    elif kind == "aws_cloudwatch_dashboard":
        yield Cost(part, "dashboard", _monthly("dashboard"))
    elif kind == "aws_route53_health_check":
        https = _monthly("health_check_https") if values["type"] == "HTTPS" else 0.0
        yield Cost(part, "health checks", _monthly("health_check") + https)
    elif kind == "aws_autoscaling_group":
        yield _machine(address, values, all_of_them)


def _task(task: Mapping[str, Any]) -> float:
    """Full price of one Fargate task; a spot task costs about a third."""
    cpu = "arm" if (task.get("runtime_platform") or [{}])[0].get("cpu_architecture") == "ARM64" else "x86"
    disk = (task.get("ephemeral_storage") or [{}])[0].get("size_in_gib") or _FREE_DISK_GIB
    return (
        int(task["cpu"]) / 1024 * _hourly(f"fargate_{cpu}_vcpu")
        + int(task["memory"]) / 1024 * _hourly(f"fargate_{cpu}_gib")
        + (disk - _FREE_DISK_GIB) * _hourly("fargate_disk_gib")
    )


def _machine(address: str, values: Mapping[str, Any], all_of_them: Mapping[str, Any]) -> Cost:
    policy = values["mixed_instances_policy"][0]
    machine = policy["launch_template"][0]["override"][0]["instance_type"]
    template = all_of_them[address.replace("aws_autoscaling_group", "aws_launch_template")]["values"]
    disk = template["block_device_mappings"][0]["ebs"][0]["volume_size"] * _monthly("gp3_gib")
    spot = policy["instances_distribution"][0]["on_demand_percentage_above_base_capacity"] == 0
    how = "at its price on demand; as spot it is less" if spot else "on demand"
    try:
        price = BOOK.require(machine, PRICES["region"], "on-demand").per_hour
    except PriceBookError as error:
        raise UnknownPrice(str(error)) from error
    return Cost(f"the pool {values['name']}", f"{machine} {how}", price + disk, True, values["max_size"])


def _hourly(name: str) -> float:
    if name not in PRICES["hourly"]:
        raise UnknownPrice(f"infra/prices.json has no price for {name}; add it")
    return float(PRICES["hourly"][name])


def _monthly(name: str) -> float:
    return float(PRICES["monthly"][name]) / HOURS_A_MONTH


def main() -> int:
    try:
        found = costs(json.load(sys.stdin))
    except UnknownPrice as error:
        sys.exit(f"error: {error}")
    print("\n".join(table(found)))
    print(f"Prices of {PRICES['region']}, {PRICES['as_of']}: infra/prices.json; of machines: schemas/prices.toml.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
