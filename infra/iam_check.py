"""Checks a process's IAM policy against the requests that the process sent to AWS.

Evaluates the parts of IAM's language that the policies of infra/terraform use: Allow and Deny, actions by name,
resources with `*`, and StringEquals conditions on properties of the request.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import unquote

from infra.local_aws import REGION, AwsRequest

_KEY: Final = re.compile(rb"<Key>([^<]*)</Key>")
_GZIP: Final = b"\x1f\x8b"  # large requests to CloudWatch are compressed
_ACCOUNT: Final = "000000000000"


@dataclass(frozen=True, slots=True)
class Right:
    """An action on a resource, which IAM allows or denies. `context`: condition keys."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)


def rights_for(request: AwsRequest) -> Iterator[Right]:
    """Rights that the sender of a request needs (Service Authorization Reference of S3, SQS and CloudWatch)."""
    if request.service == "s3":
        yield from _s3(request)
    elif request.service == "sqs":
        body = json.loads(request.body or b"{}")
        action = request.target.partition(".")[2].removesuffix("Batch")
        queue = str(body.get("QueueUrl", "")).rpartition("/")[2]
        yield Right(f"sqs:{action}", f"arn:aws:sqs:{REGION}:{_ACCOUNT}:{queue}")
    elif request.service == "monitoring":
        body = gzip.decompress(request.body) if request.body.startswith(_GZIP) else request.body
        namespace = str(json.loads(body or b"{}").get("Namespace", ""))
        yield Right(f"cloudwatch:{request.target.partition('.')[2]}", "*", {"cloudwatch:namespace": namespace})
    else:
        yield Right(f"{request.service}:{request.target or request.path}", "*")


def _s3(request: AwsRequest) -> Iterator[Right]:
    bucket, _, key = unquote(request.path).lstrip("/").partition("/")
    arn = f"arn:aws:s3:::{bucket}"
    version = "Version" if "versionId" in request.query else ""
    if not key:
        if "delete" in request.query:
            for name in _KEY.findall(request.body):
                yield Right("s3:DeleteObject", f"{arn}/{name.decode()}")
        else:
            yield Right("s3:ListBucket", arn)
        return
    here = f"{arn}/{key}"
    if request.method in ("GET", "HEAD"):
        yield Right(f"s3:GetObject{version}", here)
        if request.status == 404:  # without ListBucket, S3 answers 403 for a missing key
            yield Right("s3:ListBucket", arn)
    elif request.method == "DELETE":
        yield Right("s3:AbortMultipartUpload" if "uploadId" in request.query else f"s3:DeleteObject{version}", here)
    else:
        yield Right("s3:PutObject", here)


class Policy:
    """A policy document. Counts the uses of each action and resource that it allows."""

    def __init__(self, text: str) -> None:
        self._statements: list[dict[str, Any]] = json.loads(text)["Statement"]
        self._used: Counter[tuple[str, str]] = Counter()

    def allows(self, right: Right) -> bool:
        """Whether IAM would allow it."""
        allowed = False
        for statement in self._statements:
            matching = [
                (action, resource)
                for action in _many(statement["Action"])
                for resource in _many(statement["Resource"])
                if fnmatchcase(right.action, action) and fnmatchcase(right.resource, resource)
            ]
            if not matching or not _holds(statement.get("Condition", {}), right.context):
                continue
            if statement["Effect"] == "Deny":
                return False
            allowed = True
            self._used.update(matching)
        return allowed

    def unused(self) -> list[tuple[str, str]]:
        """Allowed actions and resources that no request has needed yet."""
        granted = {
            (action, resource)
            for statement in self._statements
            if statement["Effect"] == "Allow"
            for action in _many(statement["Action"])
            for resource in _many(statement["Resource"])
        }
        return sorted(granted - self._used.keys())


def denied(policy: Policy, requests: Iterable[AwsRequest]) -> list[Right]:
    """Rights that the requests need and the policy doesn't grant."""
    needed = {right for request in requests for right in rights_for(request)}
    return sorted((right for right in needed if not policy.allows(right)), key=lambda right: right.action)


def _many(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _holds(condition: Mapping[str, Mapping[str, str | list[str]]], context: Mapping[str, str]) -> bool:
    for operator, wanted in condition.items():
        if operator != "StringEquals":
            raise ValueError(f"the condition operator {operator} is not supported")
        if any(context.get(name) not in _many(values) for name, values in wanted.items()):
            return False
    return True
