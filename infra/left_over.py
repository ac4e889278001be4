"""Lists an account's resources of the kinds that infra/terraform creates, to check that destroy leaves none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from botocore.exceptions import ClientError

from infra.local_aws import REGION, LocalAws

_GONE: Final = frozenset({"INACTIVE", "deleted", "deleting", "PendingDeletion", "terminated", "released", "DELETED"})
Client = Callable[[str], Any]


def inventory(aws: LocalAws) -> set[str]:
    """Kind and name of each existing resource."""
    found: set[str] = set()
    for list_resources in (_storage, _network, _compute, _monitoring, _rights):
        found |= set(list_resources(aws.client))
    scaling = aws.moto.client("application-autoscaling")
    targets = scaling.describe_scalable_targets(ServiceNamespace="ecs")["ScalableTargets"]
    policies = scaling.describe_scaling_policies(ServiceNamespace="ecs")["ScalingPolicies"]
    found |= {f"scalable target {one['ResourceId']}" for one in targets}
    return found | {f"scaling policy {one['PolicyName']}" for one in policies}


def _storage(client: Client) -> Iterator[str]:
    yield from (f"bucket {one['Name']}" for one in client("s3").list_buckets()["Buckets"])
    yield from (f"queue {url}" for url in client("sqs").list_queues().get("QueueUrls", []))
    cache = client("elasticache")
    groups = cache.describe_replication_groups()["ReplicationGroups"]
    yield from (f"cache {one['ReplicationGroupId']}" for one in groups if one["Status"] not in _GONE)
    yield from (
        f"cache subnets {one['CacheSubnetGroupName']}"
        for one in cache.describe_cache_subnet_groups()["CacheSubnetGroups"]
    )
    parameters = cache.describe_cache_parameter_groups()["CacheParameterGroups"]
    names = (one["CacheParameterGroupName"] for one in parameters)
    yield from (f"cache parameters {name}" for name in names if not name.startswith("default"))
    secrets = client("secretsmanager").list_secrets()["SecretList"]
    yield from (f"secret {one['Name']}" for one in secrets if "DeletedDate" not in one)
    keys = client("kms")
    described = (keys.describe_key(KeyId=one["KeyId"])["KeyMetadata"] for one in keys.list_keys()["Keys"])
    yield from (f"key {one['KeyId']}" for one in described if one["KeyState"] not in _GONE)
    yield from (f"alias {one['AliasName']}" for one in keys.list_aliases()["Aliases"])


def _network(client: Client) -> Iterator[str]:
    ec2 = client("ec2")
    for call, answer, name in (
        ("describe_vpcs", "Vpcs", "VpcId"),
        ("describe_subnets", "Subnets", "SubnetId"),
        ("describe_route_tables", "RouteTables", "RouteTableId"),
        ("describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
        ("describe_nat_gateways", "NatGateways", "NatGatewayId"),
        ("describe_addresses", "Addresses", "AllocationId"),
        ("describe_security_groups", "SecurityGroups", "GroupId"),
        ("describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId"),
        ("describe_flow_logs", "FlowLogs", "FlowLogId"),
        ("describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
        ("describe_instances", "Reservations", "ReservationId"),
    ):
        for one in getattr(ec2, call)()[answer]:
            if one.get("State") not in _GONE:
                yield f"{answer} {one[name]}"
    balancers = client("elbv2")
    yield from (f"balancer {one['LoadBalancerArn']}" for one in balancers.describe_load_balancers()["LoadBalancers"])
    yield from (f"target group {one['TargetGroupArn']}" for one in balancers.describe_target_groups()["TargetGroups"])


def _compute(client: Client) -> Iterator[str]:
    ecs = client("ecs")
    arns = ecs.list_clusters()["clusterArns"]
    for cluster in ecs.describe_clusters(clusters=arns)["clusters"] if arns else []:
        if cluster["status"] not in _GONE:
            yield f"cluster {cluster['clusterName']}"
            yield from (f"service {arn}" for arn in ecs.list_services(cluster=cluster["clusterName"])["serviceArns"])
    yield from (f"task definition {arn}" for arn in ecs.list_task_definitions(status="ACTIVE")["taskDefinitionArns"])
    providers = ecs.describe_capacity_providers()["capacityProviders"]
    names = (one["name"] for one in providers if one.get("status") not in _GONE)
    yield from (f"capacity provider {name}" for name in names if not name.startswith("FARGATE"))
    groups = client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    yield from (f"scaling group {one['AutoScalingGroupName']}" for one in groups)


def _monitoring(client: Client) -> Iterator[str]:
    yield from (f"log group {one['logGroupName']}" for one in client("logs").describe_log_groups()["logGroups"])
    cloudwatch = client("cloudwatch")
    yield from (f"alarm {one['AlarmName']}" for one in cloudwatch.describe_alarms()["MetricAlarms"])
    yield from (f"dashboard {one['DashboardName']}" for one in cloudwatch.list_dashboards()["DashboardEntries"])
    yield from (f"topic {one['TopicArn']}" for one in client("sns").list_topics()["Topics"])
    try:
        budgets = client("budgets").describe_budgets(AccountId="000000000000").get("Budgets", [])
    except ClientError:  # some emulators answer an account without budgets with an error
        budgets = []
    yield from (f"budget {one['BudgetName']}" for one in budgets)


def _rights(client: Client) -> Iterator[str]:
    iam = client("iam")
    yield from (f"role {one['RoleName']} in {REGION}" for one in iam.list_roles()["Roles"])
    yield from (f"profile {one['InstanceProfileName']}" for one in iam.list_instance_profiles()["InstanceProfiles"])
    yield from (f"policy {one['PolicyName']}" for one in iam.list_policies(Scope="Local")["Policies"])
