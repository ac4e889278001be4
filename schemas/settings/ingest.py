"""Settings of what comes in: S3, its drops, Kafka and Celery."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from schemas.requests.limits import Positive


class S3Options(BaseModel):
    """How to reach S3. Credentials are found where AWS's tools look for them, and never stand here.

    Attributes:
        endpoint: URL of another server than AWS's.  path_style: the bucket in the path; None: with an endpoint.
        encryption: at rest: SSE-S3 ("AES256"), SSE-KMS ("aws:kms"), or as the bucket is set up ("").
        kms_key: id or ARN of the key for SSE-KMS.
        checksums: "when_required" for servers that don't know S3's newer checksums.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    encryption: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = ""
    kms_key: str | None = None
    checksums: Literal["when_supported", "when_required"] = "when_supported"


class BucketOptions(BaseModel):
    """Where files are dropped, when the root is a bucket.

    Attributes:
        places: prefix below the root -> the tenant whose place it is.
        queue_url: the SQS queue that the bucket tells of new objects; None: only sweeps find them.
        queue_endpoint: URL of another server than AWS's; None: as for S3.
        sweep_seconds: between two listings of the places.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    places: dict[str, str] = Field(default_factory=lambda: {"incoming/": "default"})
    queue_url: str | None = None
    queue_endpoint: str | None = None
    sweep_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


class KafkaOptions(BaseModel):
    """How Kafka is reached, and what of it is used.

    Attributes:
        bootstrap: "host:port" of some brokers; none: Kafka is not used.
        security, mechanism, username, password, ca_file, cert_file, key_file, key_password: as Kafka's clients know
            them.
        topic_prefix: of requests, jobs, results, events and deadletter.
        requests, jobs: topic -> tenant; empty: the prefix's topic, for the tenant "default".
        group: of the consumers.  epoch: names the cluster, where its topics have no ids.
        start: where a group begins that has no offset, or one out of range.
        batch_records, batch_seconds: a batch is stored when it has so many records, or its first has waited so long.
        reply_topics: topics that a record's `reply_to` may name.
        uri_prefixes: tenant -> beginnings of the URIs that its jobs may name.
        announce_all: jobs of other doors, too.
        idempotence: of the producer.
        session_timeout: seconds without a sign of life after which a consumer's partitions go to others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: tuple[str, ...] = ()
    security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "GSSAPI", "AWS_MSK_IAM"] | None = None
    username: str | None = None
    password: SecretStr | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    key_password: SecretStr | None = None
    topic_prefix: str = "tokenmill"
    requests: dict[str, str] = Field(default_factory=dict)
    jobs: dict[str, str] = Field(default_factory=dict)
    group: str = "tokenmill-intake"
    epoch: str | None = None
    start: Literal["earliest", "latest", "stop"] = "earliest"
    batch_records: Positive = 5_000
    batch_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    reply_topics: tuple[str, ...] = ()
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    announce_all: bool = False
    idempotence: bool = True
    session_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 45.0


class CeleryOptions(BaseModel):
    """The door for Celery's tasks.

    Attributes:
        queues: queue -> the tenant whose it is; none: there is no such door.
        result_url: of the result backend; None: the broker, where that is Redis.
        uri_prefixes: tenant -> beginnings of the URIs that its jobs may name; each ends with "/".
        generate_seconds: after which a request whose caller waits is given up, or earlier if it says so.
        generate_waiting: such requests of one process at once; further ones are tried again later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    queues: dict[str, str] = Field(default_factory=dict)
    result_url: SecretStr | None = None
    uri_prefixes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    generate_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    generate_waiting: Positive = 1_000
