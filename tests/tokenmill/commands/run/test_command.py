"""`tokenmill run` as its user sees it: rows, messages and exit codes."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.adapters.folder.locks import RunLock
from pipeline.inputs.pinning import pin_input
from schemas.jobs.job import JobSettings, Tier
from schemas.jobs.plan import PlanSegment
from schemas.models import ModelPin
from tokenmill.config.engine_options import EngineOptions
from tokenmill.config.job_options import ChosenModel
from tokenmill.local.run_job import run_job
from tokenmill.local.run_plan import RunPlan, load_model
from tokenmill.local.tracker import RunTracker
from tokenmill.models import sources
from workers.model.loaded_model import LoadedModel

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]

BIG = 11 * 1024 * 1024


def digests(out: Path) -> dict[str, str]:
    """The bytes of a job's result files."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (out / "results").iterdir()}


def bad_lines(chat: Chat) -> list[tuple[dict[str, Any] | str | bytes, str]]:
    """Each kind of bad line, and the code that its row must carry."""
    nowhere = {**chat("nowhere"), "url": "/v1/nowhere"}
    return [
        ('{"custom_id": "cut', "invalid_json"),
        (b'{"custom_id": "latin-1 \xe9"}', "invalid_json"),
        ('{"custom_id": "' + "x" * BIG + '"}', "invalid_json"),
        ("[" * 5000 + "]" * 5000, "invalid_json"),
        ("[1, 2]", "invalid_json"),
        ({key: value for key, value in chat("x").items() if key != "custom_id"}, "invalid_request"),
        (chat("good-0"), "duplicate_custom_id"),
        (nowhere, "unsupported_url"),
        ({**chat("embed"), "url": "/v1/embeddings", "body": {"model": "tiny", "input": "x"}}, "unsupported_url"),
        ({**chat("empty embed"), "url": "/v1/embeddings", "body": {"model": "tiny", "input": [""]}}, "invalid_request"),
        (chat("typo", tempreature=0.1), "unsupported_parameter"),
        (chat("tools", tools=[{"type": "function", "function": {"name": "f"}}]), "unsupported_parameter"),
        (chat("streamed", stream=True), "unsupported_parameter"),
        (chat("long", text="word " * 2000), "context_length_exceeded"),
        (chat("none", max_tokens=0), "invalid_request"),
        (chat("cold", temperature=-1), "invalid_request"),
        (chat("empty", messages=[]), "invalid_request"),
        (chat("other", model="gpt-5"), "model_not_found"),
    ]


@pytest.mark.slow
def test_given_every_kind_of_bad_line_when_run_then_good_rows_succeed_and_bad_rows_have_reasons(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    bad = bad_lines(chat)
    lines: list[Any] = [chat("good-0")]
    for number, (line, _) in enumerate(bad, start=1):
        lines += [line, "", chat(f"good-{number}", text=f"question {number}")]
    path = write_lines(*lines)

    ended = tokenmill("run", path, "--model", f"tiny={model_folder}", "--output", folder / "out", "--dtype", "float32")

    rows = results(folder / "out")
    failed = [row for row in rows if row["status"] == "failed"]
    assert ended.code == 0, ended.err
    assert ended.err.splitlines()[-1].endswith(
        f"{len(bad) + 1} of {2 * len(bad) + 1} rows succeeded, {len(bad)} failed"
    )
    assert [row["error_code"] for row in failed] == [code for _, code in bad]
    assert [row["row"] for row in failed] == [1 + 3 * index for index in range(len(bad))]
    for row in failed:
        assert row["error_message"]
        assert row["status_code"] >= 400
        assert row["error_message"].startswith(f"line {row['row'] + 1} of the input: "), row
    good = [row for row in rows if row["status"] == "succeeded"]
    assert [row["custom_id"] for row in good] == [f"good-{index}" for index in range(len(bad) + 1)]
    assert all(row["text"] is not None and row["completion_tokens"] > 0 for row in good)


def test_given_a_file_of_only_bad_lines_when_run_then_it_ends_well_and_all_rows_failed(
    tokenmill: Cli, folder: Path, model_folder: Path, write_lines: Write, results: Results
) -> None:
    ended = tokenmill("run", write_lines("{", "}"), "--model", model_folder, "--output", folder / "out")

    assert ended.code == 0, ended.err
    assert "0 of 2 rows succeeded, 2 failed" in ended.err.splitlines()[-1]
    assert [row["error_code"] for row in results(folder / "out")] == ["invalid_json", "invalid_json"]


def test_given_an_empty_file_when_run_then_it_ends_well_with_no_rows(
    tokenmill: Cli, folder: Path, model_folder: Path, results: Results
) -> None:
    path = folder / "empty.jsonl"
    path.touch()

    ended = tokenmill("run", path, "--model", model_folder, "--output", folder / "out")

    assert ended.code == 0
    assert "0 of 0 rows succeeded, 0 failed" in ended.err.splitlines()[-1]
    assert "done before" not in ended.err
    assert results(folder / "out") == []


@pytest.mark.slow
def test_given_an_invalid_input_when_it_was_corrected_then_the_same_command_succeeds(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    """No job is made of a file that can't be one, so the same command runs with the right file."""
    packed = gzip.compress(gzip.compress(json.dumps(chat("a")).encode()))
    pq.write_table(pa.table({"id": ["a"], "prompt": ["one"]}), folder / "in.parquet")
    cases = (
        (write_lines(packed), "is compressed twice"),
        (folder / "in.parquet", "custom_id (it has: id, prompt); add it, or give"),
    )
    for path, message in cases:
        arguments = ("run", path, "--model", f"tiny={model_folder}", "-o", folder / path.stem, "--max-output-tokens", 6)
        ended = tokenmill(*arguments)
        assert ended.code == 1
        assert message in ended.error
        assert not (folder / path.stem).exists()

    write_lines(chat("a"))
    assert tokenmill("run", cases[0][0], "--model", f"tiny={model_folder}", "-o", folder / "requests").code == 0


def test_given_few_long_requests_when_run_then_the_cache_is_no_larger_than_they_can_use(
    folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a", text="word " * 40, ignore_eos=True), chat("b", n=2, temperature=1.0))
    model = ChosenModel("tiny", sources.ModelSource("tiny", model_folder, None, 0))
    plan = RunPlan(
        inputs=pin_input(path), models=(model,), output=folder / "out", tier=Tier.STANDARD,
        settings=JobSettings(), engine=EngineOptions(dtype="float32", threads=1),
    )  # fmt: skip
    cache_sizes: list[tuple[int | None, int | None]] = []

    def load(plan: RunPlan, pin: ModelPin, segments: list[PlanSegment]) -> LoadedModel:
        loaded = load_model(plan, pin, segments)
        cache = loaded.engine.engine.config.cache
        cache_sizes.append((cache.sequences, cache.tokens_per_sequence))
        return loaded

    done = run_job(plan, RunTracker(), threading.Event(), load)

    assert done.counts.succeeded == 2
    assert cache_sizes == [(3, 256)]


@pytest.mark.slow
def test_given_on_invalid_job_when_a_line_is_bad_then_the_job_is_refused_before_anything_is_computed(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"), chat("b", temperature=-1), "{", chat("c"))
    arguments = ("run", path, "--model", f"tiny={model_folder}", "--output", folder / "out")

    ended = tokenmill(*arguments, "--on-invalid", "job")

    assert ended.code == 1
    assert "2 lines are invalid" in ended.error
    assert "line 2: invalid_request: temperature" in ended.err
    assert "line 3: invalid_json" in ended.err
    assert list((folder / "out").glob("results/*.parquet")) == []

    write_lines(chat("a"), chat("c"))
    assert tokenmill(*arguments, "--on-invalid", "job").code == 0


@pytest.mark.slow
def test_given_a_finished_job_when_the_same_command_runs_again_then_nothing_is_computed_or_changed(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"), chat("b", temperature=1.0), chat("c", temperature=0.9, seed=4, n=2))
    arguments = ("run", path, "--model", f"tiny={model_folder}", "--output", folder / "out")
    assert tokenmill(*arguments).code == 0
    before = digests(folder / "out")

    again = tokenmill(*arguments)
    unchanged = digests(folder / "out")
    other = tokenmill(*arguments, "--seed", "5")
    fresh = tokenmill(*arguments, "--seed", "5", "--fresh")

    assert again.code == 0
    assert "this job was done before; --fresh runs it anew" in again.err
    assert before == unchanged
    assert other.code == 1
    assert "settings.seed was 0, now 5" in other.error
    assert "--fresh" in other.error
    assert fresh.code == 0
    assert before != digests(folder / "out")  # the fresh run answered anew


@pytest.mark.slow
def test_given_json_when_a_job_ends_then_stdout_is_one_document_with_its_outcome(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"), chat("a-again"), chat("b", text="something else"), "{")

    ended = tokenmill(
        "run", path, "--model", f"tiny={model_folder}", "-o", folder / "out", "--json", "--price-per-hour", "2"
    )

    outcome = ended.json()
    assert outcome["counts"] == {
        "total": 4, "succeeded": 3, "failed": 1, "expired": 0, "cancelled": 0, "pending": 0
    }  # fmt: skip
    assert outcome["usage"]["completion"] > 0
    assert 0 < outcome["busy_seconds"] < outcome["wall_seconds"]
    assert outcome["cost"] == pytest.approx(outcome["busy_seconds"] * 2 / 3600)
    assert outcome["models"][0]["name"] == "tiny"
    assert sum(file["rows"] for file in outcome["files"]) == 4
    assert "cost" in ended.err


@pytest.mark.slow
def test_given_names_limits_and_a_template_when_run_then_each_option_is_obeyed(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    lines = [chat("a", model="gpt-4o-mini", ignore_eos=True), chat("b", model="gpt-4o-mini", max_tokens=9), chat("c")]
    template = folder / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    common = ("run", write_lines(*lines), "--model", f"gpt-4o-mini={model_folder}")

    assert tokenmill(*common, "-o", folder / "one", "--limit", "2", "--max-output-tokens", "8").code == 0
    assert tokenmill(*common, "-o", folder / "two", "--limit", "1", "--chat-template", template).code == 0

    one, two = results(folder / "one"), results(folder / "two")
    assert [(row["custom_id"], row["error_code"]) for row in one] == [("a", None), ("b", "invalid_request")]
    assert one[0]["completion_tokens"] == 6
    assert len(two) == 1
    assert two[0]["prompt_tokens"] < one[0]["prompt_tokens"]


@pytest.mark.slow
def test_given_parquet_when_run_then_other_columns_are_carried_through(
    tokenmill: Cli, folder: Path, model_folder: Path, results: Results
) -> None:
    table = pa.table({"custom_id": ["a", "b"], "prompt": ["one", "two"], "topic": ["x", "y"], "text": ["p", "q"]})
    pq.write_table(table, folder / "in.parquet")

    ended = tokenmill(
        "run", folder / "in.parquet", "--model", model_folder, "-o", folder / "out", "--max-output-tokens", "4"
    )

    rows = results(folder / "out")
    assert ended.code == 0, ended.err
    assert [(row["topic"], row["input_text"], row["status"]) for row in rows] == [
        ("x", "p", "succeeded"),
        ("y", "q", "succeeded"),
    ]


@pytest.mark.slow
def test_given_something_that_cannot_run_when_it_is_run_then_the_error_is_one_line_with_a_remedy(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"))
    file = folder / "a-file"
    file.touch()
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    tiny = f"tiny={model_folder}"
    cases = {
        ("nowhere.jsonl", tiny, folder / "out"): "nowhere.jsonl: no such file or folder",
        (
            write_lines(name="notes.txt"),
            tiny,
            folder / "out",
        ): "no .jsonl, .csv (also with .gz or .zst behind), .parquet or .arrow file",
        ("ftp://host/in.jsonl", tiny, folder / "out"): "inputs come from a path or from s3://bucket/key",
        (path, "nowhere", folder / "out"): "no model at nowhere",
        (path, "gpt-4o-mini", folder / "out"): "from their weights, and this one's are not published",
        (path, "tiny=", folder / "out"): "give MODEL, or NAME=MODEL",
        (path, broken, folder / "out"): "amba",
        ("", tiny, folder / "out"): "INPUT is empty",
        (path, tiny, file): "a-file: a file is in the way",
        (path, tiny, file / "below"): "below: a file is in the way",
    }
    for (given, model, out), message in cases.items():
        ended = tokenmill("run", given, "--model", model, "--output", out)
        assert ended.code == 1, (given, model, out)
        assert message in ended.error
        assert len(ended.error) < 400
    assert not (folder / "out").exists() or not list((folder / "out").rglob("*.parquet"))


@pytest.mark.slow
def test_given_an_output_in_use_when_run_then_it_is_never_taken_over(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    with RunLock(folder / "out"):
        ended = tokenmill("run", write_lines(chat("a")), "--model", f"tiny={model_folder}", "-o", folder / "out")

    assert ended.code == 1
    assert "another run" in ended.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "Missing argument 'INPUT'"),
        (("run", "in.jsonl", "--output", "out"), "--model"),
        (("run", "in.jsonl", "--model", "m"), "--output"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--tier", "urgent"), "'urgent' is not one of"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--threads", "0"), "--threads"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--kv-cache-memory", "much"), "'much' is no size"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--quantize", "int3"), "'int3' is not one of"),
        (
            ("run", "in.jsonl", "-m", "m", "-o", "out", "--speculate", "psychic"),
            "'psychic' is no method of speculative decoding",
        ),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--deadline", "soon"), "'soon' is no amount of time"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--deadline", "0h"), "'0h' is no amount of time"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--deadline", "9999999d"), "9999999d is more than 3650 days"),
        (("estimate", "in.jsonl", "-m", "m", "--hardware", "abacus"), "'abacus' is not known"),
        (("run", "in.jsonl", "-m", "m", "-o", ""), "it is empty; name a folder"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--price-per-hour", "inf"), "'inf' is no price"),
        (("run", "in.jsonl", "-m", "m", "-o", "out", "--price-per-hour", "nan"), "'nan' is no price"),
        (("estimate", "in.jsonl", "-m", "m", "--price-per-hour", "-1"), "'-1' is no price"),
        (("jobs", "forget"), "No such command 'forget'"),
        (("mill",), "No such command 'mill'"),
    ],
)
def test_given_a_wrong_option_when_called_then_the_error_is_one_line_and_the_exit_code_is_2(
    tokenmill: Cli, arguments: tuple[str, ...], message: str
) -> None:
    ended = tokenmill(*arguments)

    assert ended.code == 2
    assert message in ended.error
    assert "--help'" in ended.error


def test_given_debug_when_something_fails_then_the_traceback_is_shown_too(tokenmill: Cli) -> None:
    ended = tokenmill("run", "nowhere.jsonl", "-m", "demo", "-o", "out", "--debug")

    assert ended.code == 1
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: nowhere.jsonl")


@pytest.fixture(scope="module")
def other_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> Path:
    """A model with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("other") / "other"
    tiny_models.make_tiny_model("llama", folder, vocab_size=300, seed=7)
    for file in model_folder.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    for file in model_folder.glob("*.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
def test_given_several_models_when_run_then_each_row_is_answered_by_the_model_that_it_names(
    tokenmill: Cli,
    folder: Path,
    model_folder: Path,
    other_model: Path,
    chat: Chat,
    write_lines: Write,
    results: Results,
) -> None:
    lines = [chat(f"r{n}", f"question {n // 2}", model="ab"[n % 2], ignore_eos=True) for n in range(8)]
    models = ("-m", f"a={model_folder}", "-m", f"b={other_model}")

    both = tokenmill("run", write_lines(*lines), *models, "-o", folder / "both", "--dtype", "float32", "--json")
    texts = {row["custom_id"]: row["text"] for row in results(folder / "both")}

    assert both.code == 0, both.err
    assert both.json()["counts"]["succeeded"] == 8
    assert [one["model"] for one in both.json()["spending"]] == ["a", "b"]
    for name, model in (("a", model_folder), ("b", other_model)):
        own = [line for line in lines if line["body"]["model"] == name]
        alone = ("run", write_lines(*own), "-m", f"{name}={model}", "-o", folder / name, "--dtype", "float32")
        assert tokenmill(*alone).code == 0
        answers = {row["custom_id"]: row["text"] for row in results(folder / name)}
        assert answers == {row: text for row, text in texts.items() if row in answers}
    assert texts["r0"] != texts["r1"], "the same question, to another model"


@pytest.mark.exhaustive
def test_given_replicas_and_several_models_when_run_then_both_models_answer(
    tokenmill: Cli,
    folder: Path,
    model_folder: Path,
    other_model: Path,
    chat: Chat,
    write_lines: Write,
    results: Results,
) -> None:
    path = write_lines(*(chat(f"r{n}", f"question {n}", model="ab"[n % 2]) for n in range(6)))

    ended = tokenmill(
        "run", path, "-m", f"a={model_folder}", "-m", f"b={other_model}", "-o", folder / "out", "--replicas", 2
    )

    assert ended.code == 0, ended.err
    assert [row["status"] for row in results(folder / "out")] == ["succeeded"] * 6


@pytest.mark.slow
def test_given_a_job_of_several_models_when_rows_are_retried_then_its_models_answer_or_those_named_in_their_place(
    tokenmill: Cli,
    folder: Path,
    model_folder: Path,
    other_model: Path,
    chat: Chat,
    write_lines: Write,
    results: Results,
) -> None:
    long = chat("long", text="word " * 2000, model="b")
    path = write_lines(chat("a", model="a"), long)
    assert tokenmill("run", path, "-m", f"a={model_folder}", "-m", f"b={other_model}", "-o", folder / "out").code == 0

    retry = ("jobs", "retry", folder / "out")
    again = tokenmill(*retry, "-o", folder / "again", "--include-invalid")
    other = tokenmill(*retry, "-o", folder / "other", "-m", f"b={model_folder}")
    wrong = tokenmill(*retry, "-o", folder / "wrong", "-m", f"c={model_folder}")

    assert (again.code, other.code, wrong.code) == (0, 0, 1), again.err + other.err
    assert "has the models a, b" in wrong.error
    for out in ("again", "other"):
        assert [(row["custom_id"], row["error_code"]) for row in results(folder / out)] == [
            ("long", "context_length_exceeded")
        ]


def test_given_one_name_for_two_models_when_run_then_it_is_refused_as_wrong_usage(
    tokenmill: Cli, folder: Path, model_folder: Path, other_model: Path, chat: Chat, write_lines: Write
) -> None:
    path = write_lines(chat("a"))
    twice = tokenmill("run", path, "-m", f"tiny={model_folder}", "-m", f"tiny={other_model}", "-o", folder / "out")
    single = tokenmill("estimate", path, "-m", f"tiny={model_folder}", "-m", f"b={other_model}")

    assert (twice.code, single.code) == (2, 2)
    assert "two models are named 'tiny'" in twice.error
    assert "takes one model, not 2" in single.error
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_given_prompts_that_are_too_long_when_run_with_a_side_then_they_are_cut_and_the_rows_say_it(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write, results: Results
) -> None:
    text = "a message from the user\n" * 4_000
    completion = {
        "custom_id": "c", "method": "POST", "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": text, "max_tokens": 6},
    }  # fmt: skip
    common = ("run", write_lines(chat("a", text=text), chat("b"), completion), "--model", f"tiny={model_folder}")

    for side in ("left", "newline"):
        ended = tokenmill(*common, "-o", folder / side, "--truncate-prompt", side)
        assert ended.code == 0, ended.err
        long, short, plain = results(folder / side)
        for row in (long, plain):
            assert (row["status"], row["completion_tokens"]) == ("succeeded", 6)
            assert row["truncated_tokens"] > 10_000
        assert short["truncated_tokens"] is None
    other = tokenmill(*common, "-o", folder / "left", "--truncate-prompt", "right")
    assert "settings.truncate_prompt was left, now right" in other.error
    refused = tokenmill(*common, "-o", folder / "none")
    assert [row["error_code"] for row in results(folder / "none")] == [
        "context_length_exceeded", None, "context_length_exceeded"
    ], refused.err  # fmt: skip
    needed = [
        tokenmill("estimate", common[1], "--model", f"tiny={model_folder}", "--exact", "--json", *side).json()
        for side in ((), ("--truncate-prompt", "left"))
    ]
    assert [one["rejected"] for one in needed] == [2, 0]
