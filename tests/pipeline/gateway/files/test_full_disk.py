"""A full disk: writes are refused with 507, and everything else continues."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.folder.durable import LOCAL_DISK
from tests.pipeline.gateway.http_harness import lines, run_http_harness
from tests.pipeline.made_jobs import PIN
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"


class SmallDisk(type(LOCAL_DISK)):  # type: ignore[misc]
    """Has no room while it is `full`."""

    full = False

    def write_new(self, *args: Any, **more: Any) -> Any:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_new(*args, **more)


@pytest.mark.slow
def test_a_full_disk_refuses_writes_serves_reads_and_chats_and_loses_nothing(tmp_path: Path) -> None:
    disk = SmallDisk()
    with run_http_harness(tmp_path, disk=disk, finalize=False) as harness, harness.http() as http:
        client = harness.client()
        form: Any = {"files": {"file": ("a.jsonl", lines(5))}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        order = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        ended = http.post("/v1/batches", json=order).json()["id"]
        wait_for(lambda: harness.ledger(ended).manifest(), "it does not end")
        # When the disk is full, then all that would be stored is refused, as OpenAI's clients read it
        disk.full = True
        once = {"Idempotency-Key": "again"}
        for answer in (
            http.post("/v1/files", **form),
            http.post("/v1/batches", json=order),
            http.post("/v1/batches", json=order, headers=once),
            http.post(f"/v1/batches/{ended}/retry", json={"include_invalid": True}),
            http.delete(f"/v1/files/{file}"),
        ):
            assert answer.status_code == 507, (answer.request.url, answer.text)
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("storage_full", None)
            assert str(tmp_path) not in error["message"]
        # and what only reads goes on, as do chats.
        assert http.get(f"/v1/batches/{ended}").json()["status"] == "finalizing"
        assert http.get("/v1/batches").status_code == 200
        assert http.get(f"/v1/batches/{ended}/results").text.count("\n") == 5
        assert http.get(f"/v1/files/{file}/content").content == lines(5)
        assert http.get("/readyz").status_code == 200
        said = client.chat.completions.create(model=PIN.name, messages=[{"role": "user", "content": "hello"}])
        assert said.choices[0].message.content
        assert not list(harness.world.scratch.glob("upload-*")), "nothing stays of an upload that was refused"
        # When there is room again, then the same requests succeed.
        disk.full = False
        assert http.get(f"/v1/batches/{ended}").json()["status"] == "completed"
        again = http.post("/v1/batches", json=order, headers=once)
        assert again.status_code == 200
        wait_for(lambda: harness.ledger(again.json()["id"]).manifest(), "it does not end")
        assert http.delete(f"/v1/files/{http.post('/v1/files', **form).json()['id']}").status_code == 200


@pytest.mark.slow
def test_an_open_batch_on_a_full_disk_is_cancelled_once_space_is_free(tmp_path: Path) -> None:
    disk = SmallDisk()
    with run_http_harness(tmp_path, disk=disk, permits=0) as harness, harness.http() as http:
        form: Any = {"files": {"file": ("a.jsonl", lines(5))}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        order = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=order).json()["id"]
        wait_for(lambda: harness.beats.workers() and harness.beats.workers()[0].held, "no worker takes it")
        disk.full = True
        assert http.post(f"/v1/batches/{batch}/cancel").status_code == 507
        assert http.get(f"/v1/batches/{batch}").json()["status"] == "in_progress"
        disk.full = False
        assert http.post(f"/v1/batches/{batch}/cancel").status_code == 200
        harness.permits.release()
        wait_for(lambda: harness.ledger(batch).manifest(), "it does not end")


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)])
@pytest.mark.slow
def test_the_error_of_a_failed_write_distinguishes_a_full_disk(
    number: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_http_harness(tmp_path) as harness, harness.http() as http:
        real = Path.open

        def fail(path: Path, *args: Any, **more: Any) -> Any:
            if path.name.startswith("upload-"):
                raise OSError(number, os.strerror(number))
            return real(path, *args, **more)

        monkeypatch.setattr(Path, "open", fail)
        form: Any = {"files": {"file": ("a.jsonl", lines(1))}, "data": {"purpose": "batch"}}
        answer = http.post("/v1/files", **form)
        assert answer.status_code == status
        assert str(tmp_path) not in answer.text
