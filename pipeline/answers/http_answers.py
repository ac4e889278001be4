"""Answers over HTTP in the answer store: new ones become files of results, as those of a job, and any one is read."""

from __future__ import annotations

import base64
import hashlib
import io
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.answers.index import AnswerIndex
from pipeline.answers.segments import (
    HTTP,
    KEY_TYPE,
    AnswerFile,
    AnswersDamaged,
    KeySegment,
    stored_name,
)
from pipeline.ports import ObjectStore
from pipeline.results.part_files import COMPRESSION
from schemas.jobs.results import ResultRow, RowStatus, results_table
from schemas.requests.policy_report import EXTENSION, FIELD

_ROWS_AT_ONCE: Final = 512


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer over HTTP: the request's key, the response body, the request's id, and when it was answered."""

    key: bytes
    response: Mapping[str, Any]
    request: str
    at: datetime


def store_responses(index: AnswerIndex, space: str, answers: Sequence[NewAnswer]) -> int:
    """Store answers in the space; returns the bytes of their file. Raises `StoreError`."""
    buffer = io.BytesIO()
    table = results_table(_result(row, answer) for row, answer in enumerate(answers))
    pq.write_table(table, buffer, compression=COMPRESSION, write_page_checksum=True)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    at = max(answer.at for answer in answers)
    key = stored_name(f"{space}{HTTP}", at, len(data), digest[:16])
    index.store.create(key, data)
    index.counts.add("bytes", len(data))
    keys = np.frombuffer(b"".join(answer.key for answer in answers), dtype=KEY_TYPE)
    segment = KeySegment.of(keys, np.zeros(len(keys), dtype=np.int32), [AnswerFile(key=key, sha256=digest, at=at)])
    index.write(space, segment, digest[:16])
    return len(data)


def read_response(store: ObjectStore, file: AnswerFile, key: bytes) -> dict[str, Any]:
    """The response to the request with this key. Memory doesn't grow with the file.

    Raises:
        AnswersDamaged: the file can't be read, or has no such answer.  ObjectNotFound: it was removed.
        StoreError: the store can't be read.
    """
    wanted = pa.scalar(key.hex())
    try:
        with store.open(file.key) as stream:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=_READ, use_threads=False):
                found = pc.and_(pc.equal(batch["request_key"], wanted), pc.equal(batch["status"], _SUCCEEDED))
                if pc.any(found).as_py():
                    response = orjson.loads(batch["response"].filter(found)[0].as_py())
                    if isinstance(response, dict):
                        return response
                    break
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise AnswersDamaged(f"{store.locate(file.key)}: can't be read ({error})") from error
    raise AnswersDamaged(f"{store.locate(file.key)}: has no response to a request that it is listed for")


_READ: Final = ["request_key", "status", "response"]
_SUCCEEDED: Final = RowStatus.SUCCEEDED.value


def _result(row: int, answer: NewAnswer) -> ResultRow:
    """The answer as a job's result; the columns are those that a worker makes."""
    response = answer.response
    report = (response.get(EXTENSION) or {}).get(FIELD)
    choice: Mapping[str, Any] = next(iter(response.get("choices") or ()), {})
    message: Mapping[str, Any] = choice.get("message") or {}
    data: Sequence[Any] = response.get("data") or ()
    only: Mapping[str, Any] = data[0] if len(data) == 1 else {}
    text = (message.get("content") or "") if message else choice.get("text", only.get("label"))
    return ResultRow(
        custom_id=None,
        row=row,
        status=RowStatus.SUCCEEDED,
        status_code=200,
        text=text,
        finish_reason=choice.get("finish_reason"),
        response=orjson.dumps(response).decode(),
        model=response.get("model"),
        embedding=_vector(only.get("embedding")),
        finished_at=answer.at,
        reasoning=message.get("reasoning_content"),
        content_policies=None if report is None else orjson.dumps(report).decode(),
        served_by=response.get("model"),
        request_key=answer.key.hex(),
        reused_from=answer.request,
    )


def _vector(given: Any) -> Sequence[float] | None:
    """An embedding: numbers, or the base64 of little-endian float32."""
    return array("f", base64.b64decode(given)) if isinstance(given, str) else given
