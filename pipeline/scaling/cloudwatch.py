"""Publishes the backlog as CloudWatch metrics, for Auto Scaling and alarms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pipeline.ports import PipelineError
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.scaling.autoscaler import PoolDecision
from pipeline.scaling.backlog import BacklogMetrics

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ModuleNotFoundError as error:
    raise PipelineError("CloudWatch: boto3 is not installed; install it with: pip install 'tokenmill[aws]'") from error

_AT_ONCE: Final = 1_000
"""Values that CloudWatch accepts in one request."""


class CloudWatch:
    """Metrics of one namespace. Raises `PipelineError` when no client can be made, such as without a region.

    `OpenJobs` has the dimension Installation; `BacklogTokens`, `BacklogSeconds` and `TokensPerSecond` (both of one
    worker) and `Workers` have Model, too; `DesiredWorkers` and `BacklogSecondsPerWorker` (of those that are desired)
    have Installation and Pool.

    Args:
        installation: the dimension's value, so that several can share a namespace.
    """

    def __init__(self, namespace: str, installation: str, region: str | None = None) -> None:
        self._namespace = namespace
        self._of_installation = {"Name": "Installation", "Value": installation}
        config = Config(
            connect_timeout=5,
            read_timeout=20,
            retries={"mode": "standard", "total_max_attempts": 4},
            user_agent_extra="tokenmill",
        )
        try:
            self._client = boto3.session.Session(region_name=region).client("cloudwatch", config=config)
        except (BotoCoreError, ValueError) as error:
            raise PipelineError(f"CloudWatch: can't be used: {error}; correct the settings") from error

    def put(self, metrics: BacklogMetrics, decisions: Sequence[PoolDecision] = ()) -> None:
        """Publish the metrics, as of now. Raises `ServiceUnavailable`."""
        data = [*self._data(metrics), *self._decision_data(decisions)]
        for begin in range(0, len(data), _AT_ONCE):
            try:
                self._client.put_metric_data(Namespace=self._namespace, MetricData=data[begin : begin + _AT_ONCE])
            except (ClientError, BotoCoreError) as error:
                raise ServiceUnavailable(f"CloudWatch: can't tell the backlog: {error}") from error

    def _data(self, metrics: BacklogMetrics) -> Iterator[dict[str, Any]]:
        yield {
            "MetricName": "OpenJobs",
            "Dimensions": [self._of_installation],
            "Value": metrics.open_jobs,
            "Unit": "Count",
        }
        for model in metrics.models:
            dimensions = [self._of_installation, {"Name": "Model", "Value": model.model}]
            for name, value, unit in (
                ("BacklogTokens", model.tokens, "Count"),
                ("BacklogSeconds", model.seconds, "Seconds"),
                ("Workers", model.workers, "Count"),
                ("TokensPerSecond", model.tokens_per_second, "Count/Second"),
            ):
                yield {"MetricName": name, "Dimensions": dimensions, "Value": value, "Unit": unit}

    def _decision_data(self, decisions: Sequence[PoolDecision]) -> Iterator[dict[str, Any]]:
        for one in decisions:
            dimensions = [self._of_installation, {"Name": "Pool", "Value": one.pool}]
            for name, value, unit in (
                ("DesiredWorkers", one.desired, "Count"),
                ("BacklogSecondsPerWorker", one.work_per_worker, "Seconds"),
            ):
                yield {"MetricName": name, "Dimensions": dimensions, "Value": value, "Unit": unit}
