"""Submission of an input, by the target's URL to a gateway, a root's incoming folder or a topic."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tokenmill.errors import UserError
from tokenmill.jobs.backend import JobEnd, NewJob
from tokenmill.settings import read_settings

if TYPE_CHECKING:
    from pipeline.ports import ObjectStore
    from schemas.settings.settings import Settings

KAFKA: Final = "kafka://"
S3: Final = "s3://"
GATEWAYS: Final = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Submission:
    """An input that was sent.

    Attributes:
        job: the id that it has, or will have once it is ingested.
        url: of the file or record.
        root: URL of the root that the job will be in; None: the target doesn't say.
        marker: prefix of the root's records about the fate of an ingested file.
    """

    job: str
    url: str
    root: str | None
    marker: str | None = None


def submit(
    given: str, target: str, options: Mapping[str, Any], endpoint: str | None, token: str | None = None
) -> NewJob:
    """Send the input to the target: a gateway, a topic, or the incoming folder of a root.

    Args:
        token: letters and digits; what was sent to a gateway or root with the same ones is found, and not sent again.
            None: this is a new submission.

    Raises:
        UserError: a target that can't be used.  PipelineError: it can't be sent.
    """
    if target.startswith(GATEWAYS):
        from tokenmill.jobs import http_backend

        return http_backend.submit(given, target, options, endpoint, token or secrets.token_hex(10))
    if endpoint is not None:
        raise UserError("--endpoint is for gateways; elsewhere each line says its own")
    settings = read_settings()
    sent = _send(given, target, options, settings, token)
    document = {"job": sent.job, "submitted": sent.url, "root": sent.root}
    return NewJob(sent.job, document, [f"{sent.url}: submitted"], partial(_follow, sent, settings, document))


def _send(given: str, target: str, options: Mapping[str, Any], settings: Settings, token: str | None) -> Submission:
    if target.startswith(KAFKA):
        return _to_topic(given, target, options, settings)
    if "://" in target and not target.startswith(S3):
        raise UserError(
            f"--to {target}: is no target; give s3://BUCKET/PREFIX, a folder, kafka://HOST/TOPIC, or http://HOST:PORT"
        )
    if "://" in given:
        raise UserError(f"{given}: only a local file can be dropped; name an object with --to kafka://HOST/TOPIC")
    source = Path(given).expanduser()
    if target.startswith(S3):
        return _to_bucket(source, target, options, settings, token)
    return _to_folder(source, target, options, token)


def _to_folder(source: Path, target: str, options: Mapping[str, Any], token: str | None) -> Submission:
    from pipeline.adapters.folder.store import FolderStore
    from pipeline.adapters.system_clock import SystemClock
    from pipeline.ingest.client import copy_into_folder, find_sent_file, name_with
    from pipeline.ingest.files.folder_inbox import FolderInbox
    from pipeline.ingest.files.options import format_of
    from pipeline.ingest.files.source import marker_name_prefix, marker_prefix

    root = Path(target).expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; give the one that 'tokenmill serve --data' has")
    name = name_with(token or _new_token(), source)
    format_of(name)
    with FolderStore(root, read_only=True) as store:
        inbox = FolderInbox(store, SystemClock(), settle=0.0)
        sent = None if token is None else find_sent_file(inbox, store, name)
        job = sent or copy_into_folder(inbox, source, name, options)
        marker = marker_prefix(inbox.uri("")) + marker_name_prefix(inbox.uri(name))
        return Submission(job, inbox.uri(name), str(store.root), marker)


def _to_bucket(
    source: Path, target: str, options: Mapping[str, Any], settings: Settings, token: str | None
) -> Submission:
    from pipeline.adapters.s3.url import join_url, split_url
    from pipeline.ingest.client import find_sent_file, name_with, upload_to_bucket
    from pipeline.ingest.files.folder_inbox import INCOMING
    from pipeline.ingest.files.options import format_of
    from pipeline.ingest.files.s3_inbox import BucketInbox
    from pipeline.ingest.files.source import marker_name_prefix, marker_prefix
    from tokenmill.root import open_root, s3_connection

    bucket, prefix = split_url(target)
    above = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
    name = name_with(token or _new_token(), source)
    format_of(name)
    incoming, connection = f"{above}{INCOMING}", s3_connection(settings)
    inbox = BucketInbox(connection, bucket, incoming)
    url, job = inbox.uri(name), None
    if token is not None:
        with open_root(target, settings, read_only=True) as root:
            job = find_sent_file(inbox, root.world.store, name)
    if job is None:
        url, job = upload_to_bucket(connection, bucket, incoming, source, name, options)
    return Submission(job, url, target, marker_prefix(join_url(bucket, incoming)) + marker_name_prefix(url))


def _to_topic(given: str, target: str, options: Mapping[str, Any], settings: Settings) -> Submission:
    from pipeline.ingest.client import send_reference
    from tokenmill.services.intake import kafka_connection

    uri = given
    if "://" not in given:
        path = Path(given).expanduser().absolute()
        if not path.exists():
            raise UserError(f"{given}: no such file or folder; check the input's path")
        uri = f"file://{path}"
    parts = urlsplit(target)
    if "@" in parts.netloc:
        raise UserError("--to kafka://…: the URL carries credentials; set TOKENMILL_KAFKA__USERNAME and __PASSWORD")
    brokers = tuple(host if ":" in host else f"{host}:9092" for host in parts.netloc.split(",") if host)
    topic = parts.path.strip("/") or f"{settings.kafka.topic_prefix}.jobs"
    if not brokers or "/" in topic or parts.query or parts.fragment:
        raise UserError(f"--to {target}: give kafka://HOST[:PORT][,HOST[:PORT]…]/TOPIC")
    options_of_brokers = settings.kafka.model_copy(update={"bootstrap": brokers})
    connection = replace(kafka_connection(options_of_brokers), client_id="tokenmill-submit")
    position, job = send_reference(
        connection, topic, uri, options, epoch=settings.kafka.epoch, idempotence=settings.kafka.idempotence
    )
    return Submission(job, f"{KAFKA}{','.join(brokers)}/{position}", settings.root)


def is_job_in_root(root_url: str, job: str) -> bool:
    """Whether the root holds the job yet: its file may wait to be taken in. Raises `StoreError`."""
    from tokenmill.root import open_root

    with open_root(root_url, read_settings(), read_only=True) as root:
        return root.ledger(job).find_job() is not None


def _new_token() -> str:
    return secrets.token_hex(5)


def _follow(sent: Submission, settings: Settings, document: dict[str, Any]) -> JobEnd:
    """Report the job's progress until it has ended. Raises `UserError` when it was refused, or `StoppedWatching`."""
    from tokenmill.jobs.watch import end_of, follow_ledger
    from tokenmill.local.summary import summary_table
    from tokenmill.root import open_root

    if sent.root is None:
        raise UserError(f"job {sent.job} was submitted, but can't be watched: TOKENMILL_ROOT doesn't say where it is")
    with open_root(sent.root, settings, read_only=True) as root:
        manifest = follow_ledger(root.ledger(sent.job), missing=lambda: _check_refused(sent, root.world.store))
    ended = document | {"manifest": manifest.model_dump(mode="json")}
    end = end_of(manifest, f"{sent.root}/jobs/{sent.job}", lambda: ended)
    return replace(end, table=summary_table(manifest))


def _check_refused(sent: Submission, store: ObjectStore) -> None:
    """Raises `UserError` when ingest refused the file and wrote a dead letter."""
    from pipeline.ingest.files.source import TakenMarker
    from pipeline.ledger.ledger import parse_stored

    if sent.marker is None:
        return
    for info in store.list(sent.marker):
        marker = parse_stored(store.locate(info.key), store.read(info.key), TakenMarker)
        if marker.dead_letter is not None:
            raise UserError(
                f"{sent.url}: was refused; "
                f"'tokenmill deadletters show {marker.dead_letter} --root {sent.root}' says why"
            )
