"""The sender's side of the ingest sources: submit a file to a watched folder, a bucket or a topic, and compute the id
of its job.

The id is known at once, because it is derived only from the submitted file or record. File names have a token, so a
file that is sent twice with two tokens is two jobs, and no waiting file is ever replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import orjson

from pipeline.ingest.files.options import format_of, sidecars_of
from pipeline.ingest.files.source import FileVersion, Inbox, TakenMarker, marker_name_prefix, marker_prefix
from pipeline.jobs.submit import derived_job_id
from pipeline.ledger.ledger import parse_stored
from pipeline.planner.ports import InputError
from pipeline.ports import ObjectStore, PipelineError

if TYPE_CHECKING:
    from pipeline.adapters.kafka.connection import KafkaConnection
    from pipeline.adapters.s3.client import S3Connection
    from pipeline.ingest.files.folder_inbox import FolderInbox

METADATA_PREFIX: Final = "tokenmill-"


class SubmissionFailed(PipelineError):
    """Raised when a target can't take a submission."""


def name_with(token: str, source: Path) -> str:
    """A name for the file that is unused if the token is new: its own, with that. Raises `InputError` when `source` is
    no input file."""
    if not source.is_file():
        what = "is a folder; submit its files one by one" if source.is_dir() else "no such file; check the input's path"
        raise InputError(f"{source}: {what}")
    stem = source.stem.lstrip("._") or "input"
    return f"{stem}-{token}{source.suffix.lower()}"


def derive_file_job_id(inbox: Inbox, file: FileVersion) -> str:
    """The id of the job that the inbox's ingest source will create for the file."""
    pinned = inbox.pin(file, format_of(file.entry.name))
    return derived_job_id(file.modified, inbox.kind, *pinned.identity)


def find_sent_file(inbox: Inbox, store: ObjectStore, name: str) -> str | None:
    """The id of the job of a file that was sent under this name; None: none was. `store`: of the inbox's root."""
    file = inbox.find(name)
    if file is not None:
        return derive_file_job_id(inbox, file)
    for info in store.list(marker_prefix(inbox.uri("")) + marker_name_prefix(inbox.uri(name))):
        marker = parse_stored(store.locate(info.key), store.read(info.key), TakenMarker)
        if marker.job is not None:
            return marker.job
    return None


def copy_into_folder(inbox: FolderInbox, source: Path, name: str, options: Mapping[str, Any]) -> str:
    """Copy the file into the watched folder, after a sidecar with its options; returns the job's id.

    The file appears under its name when it is complete. Raises `SubmissionFailed`.
    """
    target = Path(inbox.uri(name))
    if not target.parent.is_dir():
        raise SubmissionFailed(
            f"{target.parent}: no such folder, so no process watches it; start 'tokenmill serve' with it first"
        )
    sidecar = target.with_name(sidecars_of(name)[0])
    try:
        if options and not sidecar.exists():  # a killed sender may have written it
            _publish(sidecar, lambda hidden: hidden.write_bytes(orjson.dumps(dict(options))))
        _publish(target, lambda hidden: shutil.copyfile(source, hidden))
    except OSError as error:
        with contextlib.suppress(OSError):
            sidecar.unlink(missing_ok=True)
        raise SubmissionFailed(f"{error.filename or target}: can't be written or read: {error.strerror}") from error
    file = inbox.find(name)
    if file is None:
        raise SubmissionFailed(f"{target}: was removed as soon as it was there; see who cleans up this folder")
    return derive_file_job_id(inbox, file)


def _publish(path: Path, write: Any) -> None:
    """Write the file durably under a hidden name, then link it to its final name."""
    hidden = path.with_name(f".{path.name}")
    try:
        write(hidden)
        with hidden.open("rb") as stream:
            os.fsync(stream.fileno())
        os.link(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def upload_to_bucket(
    connection: S3Connection, bucket: str, prefix: str, source: Path, name: str, options: Mapping[str, Any]
) -> tuple[str, str]:
    """Upload the file below `prefix`, with its options as metadata; returns its URI and the job's id.

    Raises:
        NotSent: an option can't be metadata.  StoreError: it can't be uploaded.
    """
    from pipeline.adapters.s3.client import ConditionFailed  # noqa: PLC0415 - boto3 comes with an extra
    from pipeline.adapters.s3.multipart import upload_parts  # noqa: PLC0415
    from pipeline.ingest.files.s3_inbox import BucketInbox  # noqa: PLC0415

    inbox = BucketInbox(connection, bucket, prefix)
    where, key = inbox.uri(name), prefix + name
    arguments: dict[str, Any] = {"Metadata": _metadata(options, where), **connection.settings.encryption_arguments()}
    client = connection.client
    with contextlib.suppress(ConditionFailed):  # no other sender uses the name: an answer was lost, and the file exists
        if source.stat().st_size >= connection.settings.multipart_bytes:
            upload_parts(connection, bucket, key, source, arguments)
        else:
            data = source.read_bytes()
            connection.run(
                "create it",
                where,
                lambda: client.put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", **arguments),
            )
    file = inbox.find(name)
    if file is None:
        raise SubmissionFailed(f"{where}: was removed as soon as it was there; see who deletes there")
    return where, derive_file_job_id(inbox, file)


def _metadata(options: Mapping[str, Any], where: str) -> dict[str, str]:
    found = {}
    for name, value in options.items():
        text = orjson.dumps(value).decode() if isinstance(value, dict | bool) else str(value)
        if not text.isascii():
            raise SubmissionFailed(
                f"{where}: {name} is {text!r}, but S3's metadata takes ASCII only; put it into a sidecar file"
            )
        found[METADATA_PREFIX + name.replace("_", "-")] = text
    return found


def send_reference(
    connection: KafkaConnection,
    topic: str,
    uri: str,
    options: Mapping[str, Any],
    *,
    epoch: str | None,
    idempotence: bool,
) -> tuple[str, str]:
    """Send a record that names the input, and wait for its confirmation; returns the record's position and the job's
    id.

    Raises `SubmissionFailed`, and `KafkaSettingsError` where brokers give topics no ids and there is no epoch.
    """
    from kafka import KafkaProducer  # noqa: PLC0415 - comes with an extra
    from kafka.errors import KafkaError  # noqa: PLC0415

    from pipeline.adapters.kafka.producer import ProducerSettings  # noqa: PLC0415
    from pipeline.ingest.kafka.micro_batches import moment  # noqa: PLC0415
    from pipeline.ingest.kafka.settings import KafkaIngestSettings  # noqa: PLC0415
    from pipeline.ingest.kafka.topic_ids import TopicIds  # noqa: PLC0415

    value = orjson.dumps({"uri": uri, "options": dict(options)})
    ids = TopicIds(KafkaIngestSettings(connection, jobs={topic: "default"}, requests={}, epoch=epoch))
    settings = ProducerSettings(connection, idempotence=idempotence)
    try:
        cluster = ids.cluster_of(topic)
        producer = KafkaProducer(**settings.options())
        try:
            sent = producer.send(topic, value).get(timeout=settings.delivery_timeout_seconds)
        finally:
            producer.close(timeout=5.0)
    except KafkaError as error:
        brokers = ", ".join(connection.bootstrap_servers)
        raise SubmissionFailed(f"kafka://{brokers}/{topic}: not confirmed: {type(error).__name__}: {error}") from error
    finally:
        ids.close()
    identity = (cluster, topic, str(sent.partition), str(sent.offset))
    position = f"{PurePosixPath(topic, str(sent.partition))}@{sent.offset}"
    return position, derived_job_id(moment(sent.timestamp), "kafka job", *identity)
