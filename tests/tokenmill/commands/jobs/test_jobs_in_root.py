"""`tokenmill jobs` on a root that others share: a folder, and a bucket. Dispatcher and S3's server are real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from schemas.jobs.job import OnInvalid
from schemas.jobs.outcome import JobStatus
from tests.pipeline.made_jobs import end_job, plan_by_hand
from tests.servers.moto import MotoServer
from tests.tokenmill.installation import Installation, installation
from tests.waiting import HANG_SECONDS
from tokenmill.jobs.cancel import cancel_in_root
from tokenmill.root import open_root
from tokenmill.settings import read_settings

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]
REPOSITORY = str(Path(__file__).parents[4])


@pytest.fixture
def on_folder(folder: Path) -> Iterator[Installation]:
    with (
        FolderStore(folder / "root") as store,
        installation(str(folder / "root"), store, store.scratch, folder / "inputs") as made,
    ):
        yield made


@pytest.fixture(params=["a folder", pytest.param("a bucket", marks=pytest.mark.exhaustive)])
def root(
    request: pytest.FixtureRequest, folder: Path, unique_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    """Named by TOKENMILL_ROOT."""
    if request.param == "a folder":
        made = request.getfixturevalue("on_folder")
        monkeypatch.setenv("TOKENMILL_ROOT", made.url)
        yield made
        return
    server: MotoServer = request.getfixturevalue("s3_server")
    url = f"s3://{server.make_bucket(unique_name())}/team"
    for name, value in {
        "TOKENMILL_ROOT": url,
        "TOKENMILL_S3__ENDPOINT": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": server.region,
    }.items():
        monkeypatch.setenv(name, value)
    settings = S3Settings(endpoint=server.endpoint, region=server.region, scratch=folder)
    with (
        S3Store.from_url(url, settings) as store,
        installation(url, store, store.scratch, folder / "inputs") as made,
    ):
        yield made


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_given_an_open_job_when_cancelled_retried_watched_and_exported_then_each_row_is_answered_once(
    tokenmill: Cli, folder: Path, root: Installation
) -> None:
    job = root.submit(10, "not json")
    root.start_dispatcher()
    root.await_plan(job)

    cancelled = tokenmill("jobs", "cancel", job)
    twice = tokenmill("jobs", "cancel", job, "--json")
    assert cancelled.code == 0, cancelled.err
    assert cancelled.err.splitlines()[-1].endswith("0 of 11 rows succeeded, 1 failed, 10 expired or cancelled")
    assert f"{root.url}/jobs/{job}/results: " in cancelled.err
    assert (twice.code, twice.json()["status"]) == (0, "cancelled")
    assert "was cancelled before" in twice.err
    shown = tokenmill("jobs", "show", job, "--json").json()
    assert (shown["status"], shown["tokenmill"]["counts"]["cancelled"]) == ("cancelled", 10)

    retried = tokenmill("jobs", "retry", job, "--tier", "bulk", "--deadline", "6h")
    again = tokenmill("jobs", "retry", job, "--tier", "bulk", "--deadline", "6h", "--json")
    assert retried.code == 0, retried.err
    retry = retried.out.strip()
    assert "trying 10 rows" in retried.err
    assert "1 invalid_json" in retried.err
    assert (again.json()["id"], again.json()["tokenmill"]["retry_of"]) == (retry, job)
    assert "was made before" in again.err
    assert len(tokenmill("jobs", "list", "--json").json()) == 2
    order = root.ledger(retry).job()
    first = root.ledger(job).job()
    assert (order.retry_of, order.tier, order.models, order.input) == (job, "bulk", first.models, first.input)
    assert order.deadline is not None

    root.start_worker()
    watched = tokenmill("jobs", "watch", retry, "--every", "0.1", "--json")
    assert watched.code == 0, watched.err
    assert watched.json()["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
    assert watched.err.splitlines()[-1].endswith("8 of 10 rows succeeded, 2 failed")

    to = folder / "out.jsonl"
    merged = tokenmill("jobs", "export", job, retry, "--merged", "--to", to)
    assert merged.code == 0, merged.err
    found = lines_of(to)
    assert [line["custom_id"] for line in found] == [f"r{row}" for row in range(10)] + [None]
    answered = [line["error"]["code"] if line["error"] else line["response"]["body"]["id"] for line in found]
    refused = "context_length_exceeded"
    assert answered == [*(f"r{n}" for n in range(4)), refused, *(f"r{n}" for n in range(5, 9)), refused, "invalid_json"]
    alone = tokenmill("jobs", "export", retry, "--to", to, "--errors-to", folder / "bad.jsonl", "--json")
    assert (alone.json()["succeeded"], alone.json()["others"]) == (8, 2)


def test_given_a_running_job_when_watched_then_its_progress_is_reported_until_it_ends(
    tokenmill: Cli, root: Installation
) -> None:
    job = root.submit(12)
    permits = threading.Semaphore(1)
    root.start_dispatcher()
    root.start_worker(permits)

    def let_go_on() -> None:
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until and ((now := root.ledger(job).progress()) is None or now.shards_done < 1):
            time.sleep(0.02)
        time.sleep(0.6)  # the watcher polls several times
        permits.release(2)

    helper = threading.Thread(target=let_go_on)
    helper.start()
    watched = tokenmill("jobs", "watch", job, "--every", "0.1")
    helper.join()
    assert watched.code == 0, watched.err
    lines = watched.err.splitlines()
    assert any(f"{job}: in_progress, 4 of 12 rows done, " in line for line in lines), lines
    assert len(lines) == len(set(lines)), "a line that says nothing new"
    assert lines[-1].endswith("10 of 12 rows succeeded, 2 failed")
    assert watched.out == ""
    again = tokenmill("jobs", "watch", job)
    assert (again.code, again.err.splitlines()) == (0, lines[-1:])


def test_given_a_job_that_was_refused_as_a_whole_when_watched_then_the_exit_code_is_1_with_the_reason(
    tokenmill: Cli, root: Installation
) -> None:
    job = root.submit(2, "not json", on_invalid=OnInvalid.JOB)
    root.start_dispatcher()
    watched = tokenmill("jobs", "watch", job, "--every", "0.1", "--json")
    assert watched.code == 1
    assert watched.json()["status"] == "failed"
    assert "the job failed as a whole: line 3: " in watched.error
    late = tokenmill("jobs", "cancel", job)
    assert (late.code, "has ended already (failed)" in late.error) == (1, True)
    retried = tokenmill("jobs", "retry", job)
    assert (retried.code, "refused as a whole" in retried.error) == (1, True)


@pytest.mark.parametrize("root", ["a folder", "a bucket"], indirect=True)
def test_given_many_jobs_when_listed_then_the_newest_come_first_and_nothing_is_written(
    tokenmill: Cli, root: Installation
) -> None:
    jobs = []
    for _ in range(5):
        jobs.append(root.submit(3))
        time.sleep(0.002)
    root.world.store.replace(f"jobs/{jobs[1]}/job.json", b"{damaged")
    end_job(root.ledger(jobs[2]), root.world.clock.now())
    before = sorted(info.key for info in root.world.store.list(""))

    listed = tokenmill("jobs", "list", "--json")
    newest = tokenmill("jobs", "list", "--limit", "2")
    opened = tokenmill("jobs", "list", "--active", "--json").json()
    named = tokenmill("jobs", "list", "--root", root.url, "--json").json()

    assert named == listed.json()
    by_age = [one["id"] for one in listed.json() if "problem" not in one]
    assert by_age == [job for job in reversed(jobs) if job != jobs[1]]
    (damaged,) = [one for one in listed.json() if "problem" in one]
    assert (damaged["id"], "is not JSON" in damaged["problem"]) == (jobs[1], True)
    assert "only the newest 2; --limit shows more" in newest.err
    assert jobs[4] in newest.out
    assert jobs[3] in newest.out
    assert not any(job in newest.out for job in jobs[:3])
    assert {one["id"] for one in opened} == {jobs[0], jobs[1], jobs[3], jobs[4]}
    unreadable = tokenmill("jobs", "show", jobs[1])
    assert (unreadable.code, "is not JSON" in unreadable.error) == (1, True)
    assert sorted(info.key for info in root.world.store.list("")) == before


def test_given_no_job_when_shown_then_the_error_names_folder_and_root(
    tokenmill: Cli, root: Installation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("show",), ("watch",), ("cancel",), ("retry",), ("export", "--to", folder / "x.jsonl")):
        command, *more = words
        unknown = tokenmill("jobs", command, "job-nothing", *more)
        assert unknown.code == 1
        assert f"{root.url}: holds no job job-nothing; 'tokenmill jobs list --root {root.url}'" in unknown.error
        strange = tokenmill("jobs", command, "no/where", *more)
        assert "no/where: no such folder, and not a job's id" in strange.error
    monkeypatch.delenv("TOKENMILL_ROOT")
    nowhere = tokenmill("jobs", "show", "job-nothing")
    assert nowhere.code == 1
    assert "give a job's folder, or its id with --root ROOT (or TOKENMILL_ROOT)" in nowhere.error
    assert not (folder / "x.jsonl").exists()


def test_given_options_of_engines_when_a_roots_job_is_retried_then_they_are_refused_and_nothing_is_made(
    tokenmill: Cli, on_folder: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = on_folder
    monkeypatch.setenv("TOKENMILL_ROOT", root.url)
    job = root.submit(3)
    early = tokenmill("jobs", "retry", job)
    assert "the job has not ended" in early.error
    root.start_dispatcher()
    root.await_plan(job)
    assert tokenmill("jobs", "cancel", job).code == 0
    for option in (("--model", "demo"), ("--chat-template", "x"), ("--output", "new"), ("--device", "auto")):
        refused = tokenmill("jobs", "retry", job, *option)
        assert (refused.code, option[0] in refused.error, "by its workers" in refused.error) == (1, True, True)
    none = tokenmill("jobs", "retry", job, "--only", "failed")
    assert (none.code, "no row is worth another try" in none.error) == (1, True)
    capped = tokenmill("jobs", "retry", job, "--max-output-tokens", 99_999_999)
    assert (capped.code, "above the tier's cap" in capped.error) == (1, True)
    assert len(tokenmill("jobs", "list", "--json").json()) == 1

    fewer = tokenmill("jobs", "retry", job, "--max-output-tokens", 3, "--json").json()
    assert root.ledger(fewer["id"]).job().settings.max_output_tokens == 3
    other = tokenmill("jobs", "retry", job, "--json").json()
    assert other["id"] != fewer["id"]


def test_given_a_retry_that_failed_as_a_whole_when_repeated_then_there_is_another(
    tokenmill: Cli, on_folder: Installation
) -> None:
    root, at = on_folder, ("--root", on_folder.url)
    job = root.submit(3)
    root.start_dispatcher()
    root.await_plan(job)
    assert tokenmill("jobs", "cancel", job, *at).code == 0
    source = root.inputs / f"{job}.jsonl"
    away = source.rename(root.inputs / "away")
    failed = tokenmill("jobs", "retry", job, *at, "--watch")
    assert (failed.code, "can't read the input" in failed.error) == (1, True)
    away.rename(source)
    root.start_worker()
    retried = tokenmill("jobs", "retry", job, *at, "--watch", "--json")
    assert retried.code == 0, retried.err
    assert retried.json()["id"] != failed.out.strip()
    assert retried.json()["request_counts"]["completed"] == 3


def test_given_no_dispatcher_when_cancelled_then_the_job_is_not_ended_until_one_starts(
    tokenmill: Cli, on_folder: Installation
) -> None:
    root = on_folder
    job = root.submit(3)
    with open_root(root.url, read_settings()) as opened:
        assert cancel_in_root(opened, job, wait=0.2).manifest is None
    assert tokenmill("jobs", "show", job, "--root", root.url, "--json").json()["status"] == "cancelling"
    root.start_dispatcher()
    assert tokenmill("jobs", "watch", job, "--root", root.url, "--every", "0.1").code == 0
    assert root.ledger(job).status() is JobStatus.CANCELLED


def test_given_a_jobs_folder_below_a_root_when_cancelled_then_it_is_the_roots_job(
    tokenmill: Cli, on_folder: Installation
) -> None:
    root = on_folder
    job = root.submit(3)
    root.start_dispatcher()
    root.await_plan(job)
    folder = Path(root.url) / "jobs" / job
    done = tokenmill("jobs", "cancel", folder)
    assert done.code == 0, done.err
    assert f"{job}: cancelled; waiting for the dispatcher" in done.err
    assert root.ledger(job).manifest() is not None
    assert tokenmill("jobs", "show", folder, "--json").json()["id"] == job
    watched = tokenmill("jobs", "retry", folder, "--json").json()
    assert watched["tokenmill"]["retry_of"] == job


def test_given_an_output_folder_when_watched_then_its_run_is_reported_until_it_ends(
    tokenmill: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderStore(folder / "out") as store:
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store)
        plan_by_hand(ledger, world, [], rejected=[0, 1])
        dispatcher = Dispatcher(world, MemoryQueue(), MemoryHeartbeats(world.clock, 10.0))
        dispatcher.add(ledger)
        # The job ends between the first poll and the second.
        monkeypatch.setattr("tokenmill.jobs.watch.time", SimpleNamespace(sleep=lambda _: dispatcher.tick()))
        watched = tokenmill("jobs", "watch", "out", "--every", "0.1")
    assert watched.code == 0, watched.err
    assert watched.err.splitlines()[0].startswith(f"{folder / 'out'}: finalizing, 2 of 2 rows done, 2 failed")
    assert watched.err.splitlines()[-1] == f"{folder / 'out'}/results: 0 of 2 rows succeeded, 2 failed"


def test_given_a_missing_root_when_looked_at_then_it_is_not_made(tokenmill: Cli, folder: Path) -> None:
    for command in (("list",), ("show", "job-1"), ("cancel", "job-1")):
        gone = tokenmill("jobs", *command, "--root", folder / "typo")
        assert (gone.code, "no such folder" in gone.error) == (1, True)
    assert not (folder / "typo").exists()


def test_given_a_watcher_when_stopped_by_ctrl_c_then_it_reports_that_the_job_goes_on(
    folder: Path, on_folder: Installation
) -> None:
    job = on_folder.submit(3)
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "jobs", "watch", job, "--root", on_folder.url, "--every", "0.1"],
        env={**os.environ, "PYTHONPATH": REPOSITORY}, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(HANG_SECONDS) == 130
    assert first == f"{job}: validating\n"
    assert rest == f"{job}: no longer watched; the job goes on\n"
    assert on_folder.ledger(job).status() is JobStatus.VALIDATING


@pytest.mark.exhaustive
def test_given_a_machine_without_engines_when_a_roots_jobs_are_steered_then_none_is_loaded(
    on_folder: Installation,
) -> None:
    job = on_folder.submit(3)
    on_folder.start_dispatcher()
    program = (
        "import sys; from tokenmill.cli import main\n"
        "for command in ('show', 'cancel', 'retry', 'watch'):\n"
        f"    assert main(['jobs', command, '{job}', '--root', '{on_folder.url}']) == 0, command\n"
        "print(*{'torch', 'transformers', 'engine'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": REPOSITORY},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
