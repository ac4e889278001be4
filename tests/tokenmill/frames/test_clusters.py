"""`tokenmill.map` over a Ray dataset, a Spark frame and by an installation: the answers are those of one process, also
if a process is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM

import tokenmill as tm
from tests.tokenmill.command_processes import Processes
from tests.waiting import wait_for
from tokenmill.errors import InvalidCall

pytestmark = pytest.mark.clusters

ROWS = 2_000
BLOCK = 250
Choice = Literal["yes", "no"]
CALL: dict[str, Any] = {
    "prompt": "{{ item }}?", "output": Choice, "max_tokens": 20, "temperature": 1.0, "seed": 7, "threads": 1,
    "kv_cache_memory": 50_000_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return pa.table({"row": range(ROWS), "item": [f"number {n % 700}" for n in range(ROWS)]})


@pytest.fixture(scope="module")
def model(model_folder: Path) -> str:
    return f"tiny={model_folder}"


@pytest.fixture(scope="module")
def here(table: pa.Table, model: str) -> list[dict[str, Any]]:
    """The table, answered in this process as a polars frame."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return rows_of(tm.map(frame, model=model, **CALL).to_arrow())


def is_odd(answer: str, row: dict[str, Any]) -> str | None:
    """For `validate`: refuse an answer of an odd number of characters, of every third row."""
    return "odd" if row["row"] % 3 == 0 and len(answer) % 2 else None


VALIDATED = {**CALL, "output": str, "max_tokens": 4, "validate": is_odd, "max_tries": 3}


@pytest.fixture(scope="module")
def validated_here(table: pa.Table, model: str) -> list[dict[str, Any]]:
    """The first rows, answered in this process and judged."""
    answered = tm.map(table.slice(0, BLOCK), model=model, **VALIDATED)
    assert len(set(answered["answer_tries"].to_pylist())) > 1, "else nothing was asked again"
    return judged(answered)


@pytest.fixture(scope="module")
def with_adapters(model_folder: Path, adapters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A call whose rows are answered by two adapters, or by the model alone."""
    base, folder = AutoModelForCausalLM.from_pretrained(model_folder), tmp_path_factory.mktemp("adapters")
    given = {name: adapters.make_adapter(base, folder / name, seed) for seed, name in enumerate(("a0", "a1"))}
    return {**CALL, "output": str, "max_tokens": 4, "adapters": given, "adapter_column": "customer", "max_loras": 1}


@pytest.fixture(scope="module")
def customers(table: pa.Table) -> pa.Table:
    """The first rows, with the adapter of each; the last one names none that there is."""
    names = [("a0", None, "a1", "tiny")[n % 4] for n in range(BLOCK - 1)]
    return table.slice(0, BLOCK).append_column("customer", pa.array([*names, "a9"]))


@pytest.fixture(scope="module")
def adapted_here(customers: pa.Table, model: str, with_adapters: dict[str, Any]) -> list[dict[str, Any]]:
    """These rows, answered in this process."""
    answered = without_positions(tm.map(customers, model=model, **with_adapters))
    assert "(tiny, a0, a1)" in answered[-1]["answer_error"]
    return answered


def without_positions(table: pa.Table) -> list[dict[str, Any]]:
    """The rows in their order, with errors that don't say where a row is, which on clusters is its place in a block."""
    return [row | {"answer_error": re.sub(r": row \d+:", ":", row["answer_error"] or "")} for row in rows_of(table)]


def judged(table: pa.Table) -> list[dict[str, Any]]:
    """The rows in their order, with their tries."""
    rows = sorted(table.to_pylist(), key=lambda row: row["row"])
    return [{name: row[name] for name in ("row", "answer", "answer_error", "answer_tries")} for row in rows]


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """The rows in their order, without usage, which depends on what was cached."""
    rows = sorted(table.to_pylist(), key=lambda row: row["row"])
    return [{name: row[name] for name in ("row", "item", "answer", "answer_error", "answer_key")} for row in rows]


def parts_of(folder: Path) -> dict[Path, int]:
    """The committed parts of all blocks' jobs, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/results/*")}


@contextmanager
def killing(is_victim: Callable[[str], bool], folder: Path) -> Iterator[None]:
    """Kill the newest process with such a command line when a block's job has begun to commit."""
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: any(folder.glob("*/results/*")), "no block has results", seconds=300)
        victims = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_victim(read(path)))
        killed.append(max(victims))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert killed, "no process was killed"


def read(path: Path) -> str:
    try:
        return path.read_text().replace("\0", " ")
    except OSError:
        return ""  # it has ended


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="an environment of its own has it: make test-clusters")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_given_a_dataset_when_an_actor_is_killed_then_the_answers_are_those_of_one_process(
    ray: Any, table: pa.Table, model: str, here: list[dict[str, Any]], tmp_path: Path
) -> None:
    dataset = ray.data.from_arrow([table.slice(at, BLOCK) for at in range(0, ROWS, BLOCK)])
    answered = tm.map(dataset, model=model, concurrency=2, output_dir=tmp_path, **CALL)
    with killing(lambda command: command.startswith("ray::") and "BlockMapper" in command, tmp_path):
        blocks = list(answered.iter_batches(batch_format="pyarrow", batch_size=None))

    assert rows_of(pa.concat_tables(blocks)) == here
    # A finished block is answered from its folder.
    parts = parts_of(tmp_path)
    again = tm.map(dataset, model=model, concurrency=2, output_dir=tmp_path, **CALL)
    assert rows_of(pa.concat_tables(again.iter_batches(batch_format="pyarrow", batch_size=None))) == here
    assert parts_of(tmp_path) == parts


def test_given_a_validator_when_a_dataset_is_answered_then_rows_are_asked_again_as_in_one_process(
    ray: Any, table: pa.Table, model: str, validated_here: list[dict[str, Any]]
) -> None:
    dataset = ray.data.from_arrow([table.slice(at, BLOCK // 2) for at in range(0, BLOCK, BLOCK // 2)])
    answered = tm.map(dataset, model=model, concurrency=2, **VALIDATED)

    assert judged(pa.concat_tables(answered.iter_batches(batch_format="pyarrow", batch_size=None))) == validated_here


def test_given_adapters_when_a_dataset_is_answered_then_each_row_has_its_own(
    ray: Any, customers: pa.Table, model: str, adapted_here: list[dict[str, Any]], with_adapters: dict[str, Any]
) -> None:
    dataset = ray.data.from_arrow([customers.slice(at, BLOCK // 2) for at in range(0, BLOCK, BLOCK // 2)])
    answered = tm.map(dataset, model=model, concurrency=2, **with_adapters)

    batches = answered.iter_batches(batch_format="pyarrow", batch_size=None)
    assert without_positions(pa.concat_tables(batches)) == adapted_here


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "{{ itme }}"}, "did you mean 'item'"),
        ({"concurrency": 0}, "concurrency: .* greater than or equal to 1"),
        ({"dry_run": True}, "dry_run: can't estimate"),
        ({"reuse": pa.table({})}, "reuse: must be a path"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    ray: Any, table: pa.Table, model: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCall, match=message):
        tm.map(ray.data.from_arrow(table), model=model, **CALL | change)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql", reason="an environment of its own has it: make test-clusters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)  # else its workers run the first python3 in PATH
        made = sql.SparkSession.builder.master("local[2, 4]").config("spark.ui.enabled", "false").getOrCreate()
        yield made
        made.stop()


def test_given_a_frame_when_a_task_fails_then_the_answers_are_those_of_one_process(
    session: Any, table: pa.Table, model: str, here: list[dict[str, Any]], tmp_path: Path
) -> None:
    frame = session.createDataFrame(table).repartition(4)
    answered = tm.map(frame, model=model, output_dir=tmp_path, **CALL)
    assert dict(answered.dtypes)["answer"] == "string"
    with killing(lambda command: "pyspark.daemon" in command, tmp_path):
        found = answered.toArrow()

    assert rows_of(found) == here


def test_given_a_validator_when_a_frame_is_answered_then_rows_are_asked_again_as_in_one_process(
    session: Any, table: pa.Table, model: str, validated_here: list[dict[str, Any]]
) -> None:
    frame = session.createDataFrame(table.slice(0, BLOCK)).repartition(2)

    assert judged(tm.map(frame, model=model, **VALIDATED).toArrow()) == validated_here


def test_given_adapters_when_a_frame_is_answered_then_each_row_has_its_own(
    session: Any, customers: pa.Table, model: str, adapted_here: list[dict[str, Any]], with_adapters: dict[str, Any]
) -> None:
    frame = session.createDataFrame(customers).repartition(2)

    assert without_positions(tm.map(frame, model=model, **with_adapters).toArrow()) == adapted_here


def test_given_an_installation_when_its_worker_is_killed_then_the_answers_are_those_of_one_process(
    table: pa.Table, model: str, here: list[dict[str, Any]], tmp_path: Path
) -> None:
    processes = Processes(tmp_path, TOKENMILL_MODEL_CACHE=str(tmp_path / "cache"))
    root = tmp_path / "data"
    of_here = {name: CALL[name] for name in ("threads", "kv_cache_memory")}
    call = {name: value for name, value in CALL.items() if name not in of_here}
    program = [
        "-m", "tokenmill", "serve", "--data", root, "--port", 0, "--settle", 0.2, "--model", model, "--threads", 1,
        "--kv-cache-memory", of_here["kv_cache_memory"],
    ]  # fmt: skip
    found: list[pa.Table] = []
    asking = threading.Thread(target=lambda: found.append(tm.map(table, model="tiny", root=root, **call)))
    with closing(processes):
        processes.url(processes.start(*program))
        asking.start()
        wait_for(lambda: any(root.glob("jobs/*/results/*")), "no shard has results", seconds=300)
        processes.running[0].kill()
        processes.running[0].wait()
        processes.url(processes.start(*program))
        asking.join()

    assert rows_of(found[0]) == here


def test_actors_are_rays(session: Any, table: pa.Table, model: str) -> None:
    with pytest.raises(InvalidCall, match="concurrency: is of Ray datasets"):
        tm.map(session.createDataFrame(table), model=model, concurrency=2, **CALL)
