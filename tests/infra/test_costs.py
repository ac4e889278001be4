"""Tests of infra.costs against costs that were computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.costs import PRICES, UnknownPrice, costs, table


def resource(address: str, **values: Any) -> dict[str, Any]:
    kind = next(word for word in address.split(".") if word.startswith("aws_"))
    return {"address": address, "mode": "managed", "type": kind, "values": values}


def document(*resources: dict[str, Any]) -> dict[str, Any]:
    return {"values": {"root_module": {"child_modules": [{"resources": list(resources)}]}}}


TASK = resource(
    'module.control.aws_ecs_task_definition.this["intake"]',
    cpu="512", memory="1024", ephemeral_storage=[{"size_in_gib": 30}],
    runtime_platform=[{"cpu_architecture": "X86_64"}],
)  # fmt: skip
SERVICE = resource('module.control.aws_ecs_service.this["intake"]', desired_count=2)


def dollars(*resources: dict[str, Any]) -> float:
    return sum(one.dollars for one in costs(document(*resources)) if not one.each)


def test_given_two_tasks_then_processor_memory_and_disk_above_twenty_gib_count() -> None:
    assert dollars(TASK, SERVICE) == pytest.approx(2 * (0.5 * 0.04048 + 0.004445 + 10 * 0.000111))


def test_given_endpoints_then_each_zone_counts_and_the_gateway_endpoint_costs_nothing() -> None:
    interface = resource(
        'module.network.aws_vpc_endpoint.interface["sqs"]', vpc_endpoint_type="Interface", subnet_ids=["a", "b"]
    )
    gateway = resource("module.network.aws_vpc_endpoint.s3", vpc_endpoint_type="Gateway", subnet_ids=[])
    assert dollars(interface, gateway) == pytest.approx(0.02)


def test_given_kafka_then_brokers_and_their_disks_count() -> None:
    disks = [{"ebs_storage_info": [{"volume_size": 100}]}]
    kafka = resource(
        "module.events.aws_msk_cluster.this[0]", number_of_broker_nodes=3,
        broker_node_group_info=[{"instance_type": "kafka.m7g.large", "storage_info": disks}],
    )  # fmt: skip
    assert dollars(kafka) == pytest.approx(3 * (0.204 + 100 * 0.1 / 730))


def test_given_alarms_then_each_metric_of_one_counts() -> None:
    simple = resource("module.observability.aws_cloudwatch_metric_alarm.one", metric_query=[])
    queries = [{"metric": [{}]}, {"metric": [{}]}, {"metric": []}]
    of_two = resource("module.observability.aws_cloudwatch_metric_alarm.two", metric_query=queries)
    assert dollars(simple, of_two) == pytest.approx(3 * 0.1 / 730)


def test_given_health_checks_then_https_costs_more() -> None:
    of_alarm = resource('module.dns.aws_route53_health_check.this["eu-central-1"]', type="CLOUDWATCH_METRIC")
    of_balancer = resource('module.dns.aws_route53_health_check.this["us-east-1"]', type="HTTPS")
    assert dollars(of_alarm, of_balancer) == pytest.approx((0.5 + 0.5 + 1.0) / 730)


def pool(on_demand: int) -> tuple[dict[str, Any], dict[str, Any]]:
    policy = {
        "instances_distribution": [{"on_demand_percentage_above_base_capacity": on_demand}],
        "launch_template": [{"override": [{"instance_type": "g6.xlarge"}, {"instance_type": "g5.xlarge"}]}],
    }
    group = resource(
        'module.workers.aws_autoscaling_group.this["one"]', name="tm-one", max_size=4, mixed_instances_policy=[policy]
    )
    template = resource(
        'module.workers.aws_launch_template.this["one"]', block_device_mappings=[{"ebs": [{"volume_size": 100}]}]
    )
    return group, template


def test_given_a_pool_then_its_machines_are_listed_apart_from_the_idle_costs() -> None:
    lines = table(costs(document(*pool(100), TASK, SERVICE)))
    assert lines[-1] == "| each machine of the pool tm-one | 0.816 | g6.xlarge on demand; 4 at most |"
    assert lines[-2].startswith("| all, with no worker | 0.052 |")


def test_given_a_pool_of_spot_then_the_table_notes_the_lower_price() -> None:
    assert "as spot it is less" in table(costs(document(*pool(0))))[-1]


def test_given_a_machine_without_a_price_then_it_is_an_error_and_not_nothing() -> None:
    with pytest.raises(UnknownPrice, match=r"cache\.x9\.huge"):
        dollars(
            resource(
                "module.queue.aws_elasticache_replication_group.this", node_type="cache.x9.huge", num_cache_clusters=1
            )
        )


FIRST = resource('module.network.aws_vpc_endpoint.interface["sqs"]', vpc_endpoint_type="Interface")
SUBNETS = [resource(f'module.network.aws_subnet.private["{zone}"]') for zone in "abc"]


def first_plan(zones: dict[str, Any]) -> dict[str, Any]:
    variables = {"endpoint_zones": {"default": 2}}
    call = {"expressions": zones, "module": {"variables": variables}}
    return document(FIRST, *SUBNETS) | {"configuration": {"root_module": {"module_calls": {"network": call}}}}


@pytest.mark.parametrize(
    ("given", "zones"),
    [({}, 2), ({"endpoint_zones": {"constant_value": 1}}, 1), ({"endpoint_zones": {"constant_value": 6}}, 3)],
)
def test_given_a_first_plan_then_endpoints_stand_in_as_many_zones_as_they_will(
    given: dict[str, Any], zones: int
) -> None:
    (cost,) = costs(first_plan(given))
    assert cost.dollars == pytest.approx(zones * 0.01)


def test_given_a_first_plan_that_does_not_say_the_zones_then_it_is_an_error() -> None:
    with pytest.raises(UnknownPrice, match="after apply"):
        costs(first_plan({"endpoint_zones": {"references": ["var.zones"]}}))


def test_given_prices_of_a_day_then_the_page_names_that_day() -> None:
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text(encoding="utf-8")
    assert f"(of {PRICES['as_of']};" in page
