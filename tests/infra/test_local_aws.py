"""Tests of the checks on the local installation: policies against requests, and ranges cut out of objects."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from infra.apply_locally import NOT_APPLIED, TERRAFORM, block_of, read_arguments, resource_blocks
from infra.iam_check import Policy, Right, denied, rights_for
from infra.local_aws import AwsRequest, MiniStack, cut_out


def aws_request(
    service: str, method: str, path: str, query: dict[str, list[str]] | None = None, **more: Any
) -> AwsRequest:
    fields = {"target": "", "body": b"", "status": 200} | more
    return AwsRequest("intake", service, method, path, query or {}, **fields)


def policy(*statements: dict[str, Any]) -> Policy:
    return Policy(json.dumps({"Statement": list(statements)}))


READ = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": "arn:aws:s3:::b/jobs/*"}
LIST = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::b"}


def test_given_no_example_or_one_then_all_are_tried_or_that_one_and_another_name_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read_arguments([]).examples == ["minimal", "production"]
    assert read_arguments(["minimal", "--ministack", "x"]).examples == ["minimal"]
    with pytest.raises(SystemExit):
        read_arguments(["nowhere"])
    assert "'nowhere' is no example" in capsys.readouterr().err


def test_given_blocks_that_are_left_out_then_they_exist_and_a_test_with_mocks_plans_kafka() -> None:
    blocks = resource_blocks(TERRAFORM)
    assert blocks > NOT_APPLIED
    for module, text in (("events", "aws_msk_cluster"), ("observability", "kafka_disk")):
        tests = [path.read_text() for path in (TERRAFORM / "modules" / module / "tests").glob("*.tftest.hcl")]
        assert any(text in test for test in tests), module


@pytest.mark.parametrize(
    ("address", "block"),
    [
        ("aws_kms_key.this", "minimal.aws_kms_key.this"),
        ('module.workers["chat.x"].aws_ecs_service.this', "workers.aws_ecs_service.this"),
        ("module.control.module.execution.aws_iam_role.this", "execution.aws_iam_role.this"),
        ("module.control.aws_lb.gateway[0]", "control.aws_lb.gateway"),
    ],
)
def test_given_a_resources_address_then_its_block_is_known(address: str, block: str) -> None:
    assert block_of(address, "minimal") == block


def test_given_reads_when_the_policy_covers_only_some_then_the_others_are_denied() -> None:
    requests = [
        aws_request("s3", "GET", "/b/jobs/1"),
        aws_request("s3", "GET", "/b/files/1"),
        aws_request("s3", "PUT", "/b/jobs/1"),
    ]
    assert denied(policy(READ), requests) == [
        Right("s3:GetObject", "arn:aws:s3:::b/files/1"),
        Right("s3:PutObject", "arn:aws:s3:::b/jobs/1"),
    ]


def test_given_nothing_at_a_key_then_the_right_to_list_is_needed_too() -> None:
    absent = aws_request("s3", "GET", "/b/jobs/1", status=404)
    assert denied(policy(READ), [absent]) == [Right("s3:ListBucket", "arn:aws:s3:::b")]
    assert denied(policy(READ, LIST), [absent]) == []


def test_given_one_version_is_requested_then_that_is_a_right_of_its_own() -> None:
    assert denied(policy(READ), [aws_request("s3", "GET", "/b/jobs/1", {"versionId": ["v"]})]) == [
        Right("s3:GetObjectVersion", "arn:aws:s3:::b/jobs/1")
    ]


def test_given_many_objects_are_deleted_at_once_then_each_needs_the_right() -> None:
    body = b"<Delete><Object><Key>jobs/1</Key></Object><Object><Key>keys/2</Key></Object></Delete>"
    allowed = policy({"Effect": "Allow", "Action": "s3:DeleteObject", "Resource": "arn:aws:s3:::b/jobs/*"})
    assert denied(allowed, [aws_request("s3", "POST", "/b", {"delete": [""]}, body=body)]) == [
        Right("s3:DeleteObject", "arn:aws:s3:::b/keys/2")
    ]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_given_metrics_of_another_namespace_then_the_condition_denies_them(pack: Any) -> None:
    statement = {
        "Effect": "Allow", "Action": "cloudwatch:PutMetricData", "Resource": "*",
        "Condition": {"StringEquals": {"cloudwatch:namespace": "tokenmill"}},
    }  # fmt: skip

    def put(namespace: str) -> AwsRequest:
        body = pack(json.dumps({"Namespace": namespace}).encode())
        return aws_request("monitoring", "POST", "/", target="GraniteServiceVersion20100801.PutMetricData", body=body)

    assert denied(policy(statement), [put("tokenmill")]) == []
    assert [right.action for right in denied(policy(statement), [put("elsewhere")])] == ["cloudwatch:PutMetricData"]


def test_given_a_denial_then_it_wins() -> None:
    never = {"Effect": "Deny", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::b/jobs/secret"}
    assert not policy(READ, never).allows(Right("s3:GetObject", "arn:aws:s3:::b/jobs/secret"))
    assert policy(READ, never).allows(Right("s3:GetObject", "arn:aws:s3:::b/jobs/1"))


def test_given_rights_that_no_request_needed_then_they_are_reported() -> None:
    made = policy(READ, LIST)
    assert denied(made, [aws_request("s3", "GET", "/b/jobs/1")]) == []
    assert made.unused() == [("s3:ListBucket", "arn:aws:s3:::b")]


def test_given_messages_in_a_batch_then_the_right_is_that_to_one() -> None:
    body = json.dumps({"QueueUrl": "http://here/000000000000/drops"}).encode()
    request = aws_request("sqs", "POST", "/", target="AmazonSQS.DeleteMessageBatch", body=body)
    assert list(rights_for(request)) == [Right("sqs:DeleteMessage", "arn:aws:sqs:us-east-1:000000000000:drops")]


@pytest.mark.parametrize(
    ("wanted", "part", "content_range"),
    [
        ("bytes=2-4", b"234", "2-4"),
        ("bytes=-3", b"789", "7-9"),
        ("bytes=7-", b"789", "7-9"),
        ("bytes=8-99", b"89", "8-9"),
    ],
)
def test_given_a_range_that_the_server_ignored_then_it_is_cut_out(wanted: str, part: bytes, content_range: str) -> None:
    status, headers, body = cut_out(wanted, [("ETag", "e"), ("x-amz-checksum-crc32", "of the whole")], b"0123456789")
    assert (status, body) == (206, part)
    assert dict(headers) == {"ETag": "e", "Content-Range": f"bytes {content_range}/10"}


def test_given_a_relative_program_then_it_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "ministack"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    assert MiniStack(tmp_path / "there", "bin/ministack").command() == [str(program)]
