"""Settings of S3 and of the ingest sources: buckets, Kafka and Celery."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas.requests.limits import Positive


class S3Options(BaseModel):
    """Connection settings of S3. Credentials come from AWS's credential chain, never from here.

    Attributes:
        endpoint: URL of a server other than AWS's.
        region: of the bucket; None: the environment's.
        path_style: the bucket in the path; None: with an endpoint.
        encryption: at rest: SSE-S3 ("AES256"), SSE-KMS ("aws:kms"), or the bucket's default ("").
        kms_key: id or ARN of the key for SSE-KMS.
        checksums: "when_required" for servers without S3's newer checksums.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    encryption: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = ""
    kms_key: str | None = None
    checksums: Literal["when_supported", "when_required"] = "when_supported"


class BucketOptions(BaseModel):
    """Ingest of files from a root that is a bucket.

    Attributes:
        prefixes: prefix below the root -> its tenant.
        queue_url: the SQS queue of the bucket's event notifications; None: only sweeps find new objects.
        queue_endpoint: URL of a server other than AWS's; None: as for S3.
        sweep_interval_seconds: interval of listing the prefixes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefixes: dict[str, str] = Field(default_factory=lambda: {"incoming/": "default"})
    queue_url: str | None = None
    queue_endpoint: str | None = None
    sweep_interval_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


class KafkaOptions(BaseModel):
    """Connection settings of Kafka, and its topics.

    Attributes:
        bootstrap_servers: "host:port" of some brokers; none: Kafka is not used.
        security_protocol, sasl_mechanism: as in Kafka's clients.
        username, password: for PLAIN and SCRAM.
        ca_file: trusted authorities, in PEM; None: the system's.
        cert_file, key_file, key_password: the client's own certificate, in PEM.
        topic_prefix: of requests, jobs, results, events and deadletter.
        requests, jobs: topic -> tenant; empty: the prefix's topic, for the tenant "default".
        group_id: of the consumers.  epoch: name of the cluster, where its topics have no ids.
        start: position of a group without an offset, or with one out of range.
        batch_records, batch_seconds: a batch is stored at this size, or at this age of its first record.
        reply_topics: topics that a record's `reply_to` may name.
        uri_prefixes: tenant -> allowed prefixes of its jobs' URIs.
        announce_all: also publish jobs from other ingest sources.
        idempotence: of the producer.
        session_timeout_seconds: seconds without a heartbeat after which a consumer's partitions are reassigned.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap_servers: tuple[str, ...] = ()
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "AWS_MSK_IAM"] | None = None
    username: str | None = None
    password: SecretStr | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: SecretStr | None = None
    topic_prefix: str = "tokenmill"
    requests: dict[str, str] = Field(default_factory=dict)
    jobs: dict[str, str] = Field(default_factory=dict)
    group_id: str = "tokenmill-intake"
    epoch: str | None = None
    start: Literal["earliest", "latest", "stop"] = "earliest"
    batch_records: Positive = 5_000
    batch_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    reply_topics: tuple[str, ...] = ()
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    announce_all: bool = False
    idempotence: bool = True
    session_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 45.0


class CeleryOptions(BaseModel):
    """Ingest from Celery tasks.

    Attributes:
        queues: queue -> its tenant; none: Celery is not used.
        result_url: of the result backend; None: the broker, where that is Redis.
        uri_prefixes: tenant -> allowed prefixes of its jobs' URIs; each ends with "/".
        generate_timeout_seconds: time-out of an interactive request; a request may set an earlier one.
        max_concurrent_generates: most concurrent interactive requests of a process; further ones are retried later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: dict[str, str] = Field(default_factory=dict)
    result_url: SecretStr | None = None
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    generate_timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    max_concurrent_generates: Positive = 1_000
