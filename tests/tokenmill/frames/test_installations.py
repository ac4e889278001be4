"""Tables that an installation answers, by its root and by its gateway, with small models of random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
import structlog

import tokenmill as tm
from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.s3.settings import S3Settings
from pipeline.adapters.s3.store import S3Store
from pipeline.ingest.files.s3_inbox import BucketInbox
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.intake import Intake
from tests import tiny_encoders
from tests.servers.moto import MotoServer
from tests.tokenmill.command_processes import ROOT, Processes
from tests.tokenmill.installation import installation
from tests.waiting import HANG_SECONDS, wait_for
from tokenmill.errors import InvalidCall, UserError

PROGRAM = Path(__file__).with_name("installation_program.py")
LABELS = ("bad", "good", "neither")
ROWS = [{"item": f"number {n}"} for n in range(6)] + [{"item": "message " * 4_000}]
OF_THE_ROOT = ("answer_key", "answer_reused")
"""Columns of which a gateway says nothing."""


@dataclass
class Served:
    """`tokenmill serve` with three models."""

    root: Path
    url: str

    def jobs(self) -> set[str]:
        return {path.name for path in (self.root / "jobs").glob("*")}


@pytest.fixture(scope="module")
def labels_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tiny_encoders.make_classifier("bert", tmp_path_factory.mktemp("labels") / "labels", labels=LABELS)
    return made


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, embedding_model: Path, labels_model: Path
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    processes = Processes(folder, TOKENMILL_MODEL_CACHE=str(folder / "cache"))
    models = [f"tiny={model_folder}", f"embeds={embedding_model}", f"labels={labels_model}"]
    with closing(processes):
        number = processes.start(
            "-m", "tokenmill", "serve", "--data", folder / "data", "--port", 0, "--settle", 0.2, "--dtype", "float32",
            "--threads", 1, "--price-per-hour", 3.6, *(part for model in models for part in ("--model", model)),
        )  # fmt: skip
        yield Served(folder / "data", processes.url(number))


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # as the fixture `tokenmill` does


@pytest.mark.slow
def test_given_a_table_when_a_root_and_a_gateway_answer_it_then_it_is_as_computed_here(
    served: Served, folder: Path, model_folder: Path
) -> None:
    call: dict[str, Any] = {"prompt": "{{ item }}?", "output": Literal["yes", "no"], "temperature": 0, "max_tokens": 9}

    here = tm.map(ROWS, model=f"tiny={model_folder}", dtype="float32", **call)
    by_root = tm.map(ROWS, model="tiny", root=served.root, tier="bulk", deadline="6h", **call)
    by_url = tm.map(ROWS, model="tiny", url=served.url, max_cost=9, cache=False, **call)

    assert [row["answer_error"] is None for row in here] == [True] * 6 + [False]
    assert by_root == here
    assert by_url == [{**row, **dict.fromkeys(OF_THE_ROOT)} for row in here]
    (job,) = [path for path in served.root.glob("jobs/*/job.json") if json.loads(path.read_text())["tier"] == "bulk"]
    assert json.loads(job.read_text())["deadline"] is not None
    # A column may name the model of each row, as that of an adapter.
    named = [{**row, "who": name} for row, name in zip(ROWS[:4], ("tiny", None, "nowhere", ""), strict=True)]
    for place in ({"root": served.root}, {"url": served.url}):
        rows = tm.map(named, model="tiny", adapter_column="who", **call, **place)
        assert [row["answer"] for row in rows] == [here[0]["answer"], here[1]["answer"], None, here[3]["answer"]]
        assert rows[2]["answer_error"].startswith("model_not_found: ")


@pytest.mark.slow
def test_given_vectors_and_labels_when_a_root_and_a_gateway_answer_then_they_are_as_computed_here(
    served: Served, folder: Path, model_folder: Path, embedding_model: Path, labels_model: Path
) -> None:
    frame = pl.DataFrame({"item": ["a river", "the quick fox", None]})
    calls: list[tuple[Callable[..., pl.DataFrame], str, Path, dict[str, Any], str]] = [
        (tm.embed, "embeds", embedding_model, {"column": "item"}, "embedding"),
        (tm.classify, "labels", labels_model, {"column": "item"}, "label"),
        (tm.classify, "tiny", model_folder, {"text": "{{ item }}?", "labels": ["no", "yes"]}, "label"),
    ]
    for call, name, path, arguments, column in calls:
        here = call(frame, model=f"{name}={path}", dtype="float32", **arguments)
        for place in ({"root": served.root}, {"url": served.url}):
            there = call(frame, model=name, **arguments, **place)
            unknown = [] if "root" in place else [f"{column}_{end}" for end in ("key", "reused", "cached_tokens")]
            assert there.columns == here.columns
            for one in set(here.columns) - {*unknown, f"{column}_probabilities"}:
                assert there[one].to_list() == here[one].to_list(), one
            assert [there[one].is_null().all() for one in unknown] == [True] * len(unknown)
            assert there.schema[column] == here.schema[column] or name == "labels"
            if column == "label":  # a classifier's other labels aren't in its answers
                values = [row and [*row.values()] for row in here["label_probabilities"].to_list()]
                assert [row and [*row.values()] for row in there["label_probabilities"].to_list()] == values


@pytest.mark.slow
@pytest.mark.parametrize("place", ["root", "url"])
def test_given_a_script_that_is_killed_while_it_waits_when_it_is_started_again_then_there_is_one_job(
    served: Served, folder: Path, model_folder: Path, place: str
) -> None:
    target, before = (str(served.root) if place == "root" else served.url), served.jobs()
    first = start(target, folder)
    ticket = folder / "job/submission.json"
    wait_for(lambda: ticket.exists() and json.loads(ticket.read_text())["job"], "nothing is submitted")
    first.kill()
    first.wait()
    # As if it had been killed before it wrote the job's id.
    ticket.write_text(json.dumps(json.loads(ticket.read_text()) | {"job": None}))

    for _ in range(2):
        assert start(target, folder).wait(HANG_SECONDS) == 0

    (job,) = served.jobs() - before
    assert json.loads(ticket.read_text())["job"] == job
    assert pl.read_parquet(folder / "out.parquet")["answer"].null_count() == 0
    where = {place: target}
    for change, message in (
        ({**where, "tier": "bulk"}, "holds a job with tier=None, not 'bulk'"),
        ({**where, "max_tokens": 3}, "holds a job of other prompts"),
        ({"model": f"tiny={model_folder}"}, "holds a job that is computed by an installation"),
    ):
        with pytest.raises(InvalidCall, match=message):
            again(folder, **change)


def start(target: str, folder: Path, job: str = "job") -> subprocess.Popen[bytes]:
    command = [sys.executable, PROGRAM, target, job and str(folder / job), folder / "out.parquet"]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)


def again(folder: Path, **change: Any) -> pl.DataFrame:
    """The script's call, which finds its job."""
    frame = pl.DataFrame({"item": [f"number {n}" for n in range(20)]})
    call = {"prompt": "{{ item }}?", "temperature": 1.0, "max_tokens": 20, "model": "tiny"}
    return tm.map(frame, output_dir=folder / "job", **call | change)


@pytest.fixture
def quiet(folder: Path) -> Path:
    """A root of which nothing takes jobs."""
    (folder / "root/incoming").mkdir(parents=True)
    return folder / "root"


@pytest.mark.slow
def test_given_ctrl_c_when_the_call_waits_then_it_says_how_to_go_on_and_the_job_is_left(
    quiet: Path, folder: Path
) -> None:
    script = start(str(quiet), folder, "")
    assert script.stderr is not None
    said = script.stderr.readline().decode() + script.stderr.readline().decode()
    assert "waits to be taken in" in said
    script.send_signal(signal.SIGINT)
    message, hint = script.stderr.read().decode().splitlines()[-2:]

    script.wait()
    assert hint == "This folder is a temporary one; with output_dir a call leaves one that lasts."
    job = said.split(":")[0]
    assert message.startswith(f"KeyboardInterrupt: stopped, but job {job} goes on; the same call with output_dir='")
    assert message.endswith(f"'tokenmill jobs cancel {job} --root {quiet}' ends it")
    left = Path(message.split("output_dir='")[1].split("'")[0])
    assert json.loads((left / "submission.json").read_text())["job"] == job
    assert len(list((quiet / "incoming").glob("*.jsonl"))) == 1


@pytest.mark.slow
def test_given_a_model_that_is_not_served_then_the_call_says_so(served: Served, folder: Path) -> None:
    with pytest.raises(UserError, match=r"requests-.*: was refused; 'tokenmill deadletters show"):
        tm.map(ROWS, prompt="{{ item }}", model="other", root=served.root)
    with pytest.raises(UserError, match="model 'other' is not served here"):
        tm.map(ROWS, prompt="{{ item }}", model="other", url=served.url)


@pytest.mark.slow
def test_given_a_bucket_when_the_job_is_known_by_its_file_or_its_marker_then_there_is_one(
    s3_server: MotoServer, unique_name: Callable[[], str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = unique_name()[-40:].strip("-")
    s3_server.make_bucket(bucket)
    settings = S3Settings(
        endpoint=s3_server.endpoint, region=s3_server.region, access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
    )  # fmt: skip
    for name, value in (
        ("AWS_ACCESS_KEY_ID", s3_server.access_key), ("AWS_SECRET_ACCESS_KEY", s3_server.secret_key),
        ("AWS_DEFAULT_REGION", s3_server.region), ("TOKENMILL_S3__ENDPOINT", s3_server.endpoint),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    root, ticket = f"s3://{bucket}/team/a", folder / "job/submission.json"
    with (
        S3Store(bucket, "team/a", S3Connection(settings)) as store,
        installation(root, store, store.scratch, folder / "inputs") as made,
    ):
        inbox = BucketInbox(S3Connection(settings), bucket, "team/a/incoming/")
        made.start_ingest(FileIngestSource(inbox, Intake(made.world), made.world))
        made.start_dispatcher(S3Connection(settings))
        made.start_worker()
        answers = []
        for _ in range(3):
            assert again(folder, root=root)["answer"].null_count() == 4, "each fifth request fails there"
            found = json.loads(ticket.read_text())
            ticket.write_text(json.dumps(found | {"job": None}))
            answers.append(found["job"])
            for info in store.list("incoming/"):  # only the marker is left for the third call
                if len(answers) == 2:
                    store.delete(info.key)
        assert len(set(answers)) == 1
        assert len(list(store.folders("jobs/"))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "http://127.0.0.1:1"}, "url: root names an installation already"),
        ({"root": None, "tier": "bulk"}, "tier: is of an installation's jobs; give root or url"),
        ({"root": "kafka://host"}, "root: must be s3://BUCKET/PREFIX"),
        ({"root": "http://host"}, "root: http://host is a gateway; give it as url"),
        ({"root": None, "url": "host:80"}, "url: must be http"),
        ({"dtype": "float32"}, "dtype: the workers of the installation decide that"),
        ({"deadline": "soon"}, "deadline: 'soon' is no amount of time"),
        ({"refuse_late": True}, "refuse_late: needs a deadline"),
        ({"tier": "interactive"}, "tier: "),
        ({"dry_run": True}, "dry_run: an estimate is of this machine"),
        ({"reuse": "former"}, "reuse: .* give cache=True"),
        ({"validate": bool}, "validate: can't be sent to an installation"),
        ({"output": {"type": "object"}, "max_tries": 2}, "max_tries: jobs of installations ask each row once"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_sent(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCall, match=message):
        tm.map(ROWS, **{"prompt": "{{ item }}", "model": "tiny", "root": folder / "nowhere"} | change)


def test_a_table_without_rows_asks_for_nothing(quiet: Path) -> None:
    empty = pa.table({"item": pa.array([], pa.string())})

    assert "answer" in tm.map(empty, prompt="{{ item }}", model="tiny", root=quiet).column_names
    assert "embedding" in tm.embed(empty, column="item", model="tiny", root=quiet).column_names
    assert "label" in tm.classify(empty, column="item", model="tiny", root=quiet).column_names
    assert not list((quiet / "incoming").iterdir())
