"""`run --then`: a larger model answers what isn't accepted of a smaller one; the same command goes on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from pipeline.adapters.folder.store import FolderStore
from pipeline.ledger.ledger import JobLedger
from pipeline.results.merged_table import write_merged
from schemas.jobs.cascade import Acceptance
from schemas.jobs.cascade_outcome import CascadeOutcome
from tokenmill.errors import UserError
from tokenmill.local import cascade
from tokenmill.local.acceptance import make_check

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def large(tmp_path: Path, model_folder: Path, tiny_models: Any) -> Path:
    """Another model with the same tokenizer."""
    folder = tmp_path / "large"
    tiny_models.make_tiny_model("llama", folder, vocab_size=300, num_hidden_layers=2, seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, folder / name)
    return folder


ENGINE = ("--dtype", "float32", "--threads", 1, "--price-per-hour", 3.6)


def read(path: Path) -> Rows:
    return {row["custom_id"]: row for row in pq.read_table(path).to_pylist()}


def mean_logprob(row: dict[str, Any]) -> float:
    content = json.loads(row["response"])["choices"][0]["logprobs"]["content"]
    return float(sum(token["logprob"] for token in content) / len(content))


@pytest.mark.slow
def test_rows_that_are_not_accepted_get_the_next_models_answer(
    tokenmill: Any, folder: Path, model_folder: Path, large: Path, chat: Any, write_lines: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lines = [chat(f"r{n}", f"number {n} " * (n % 5 + 1), max_tokens=6 + n % 3) for n in range(16)]
    path = write_lines(*lines, {"custom_id": "bad", "method": "POST", "url": "/v1/nothing", "body": {}})
    with_logprobs = [line | {"body": line["body"] | {"logprobs": True}} for line in lines]
    alone: dict[str, Rows] = {}
    for name, model in (("tiny", model_folder), ("large", large)):
        named = write_lines(*with_logprobs, name="alone.jsonl")
        assert tokenmill("run", named, "--model", f"tiny={model}", "--output", name, *ENGINE).code == 0
        alone[name] = read(folder / name / "results")
    # Given a threshold that a part of the small model's answers reach
    found = sorted(mean_logprob(row) for row in alone["tiny"].values())
    least = (found[7] + found[8]) / 2
    accept = folder / "accept.toml"
    accept.write_text(f"min_mean_logprob = {least}\nmax_chars = 400\n")
    command = (
        "run", path, "--model", f"tiny={model_folder}", "--then", f"large={large}", "--accept", accept,
        "--output", "out", *ENGINE,
    )  # fmt: skip
    # When it is interrupted after the second step
    with monkeypatch.context() as patch:
        patch.setattr(cascade, "write_merged", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert tokenmill(*command).code == 130
    parts = {file: file.stat().st_mtime_ns for file in folder.glob("out/**/*.parquet")}
    # Then the same command goes on there, and computes nothing again
    done = tokenmill(*command, "--json")
    assert done.code == 0, done.err
    assert {file: file.stat().st_mtime_ns for file in parts} == parts
    merged = read(folder / "out" / "cascade" / "merged.parquet")
    served_by = {name: "tiny" if mean_logprob(row) >= least else "large" for name, row in alone["tiny"].items()}
    assert {name: row["served_by"] for name, row in merged.items()} == {**served_by, "bad": None}
    assert {row["model"] for name, row in merged.items() if name != "bad"} == {"tiny"}, "as requested"
    assert all(merged[name]["text"] == alone[model][name]["text"] for name, model in served_by.items())
    assert merged["bad"]["error_code"] == "unsupported_url"
    assert list(merged) == [line["custom_id"] for line in lines] + ["bad"]
    # And the outcome has the costs
    outcome = CascadeOutcome.model_validate_json((folder / "out" / "cascade" / "cascade.json").read_bytes())
    assert done.json() == {"output": "out", **outcome.model_dump(mode="json")}
    assert [(step.model, step.rows, step.accepted) for step in outcome.steps] == [("tiny", 17, 8), ("large", 8, 8)]
    assert outcome.steps[0].rejected == {"min_mean_logprob": 8}
    assert outcome.cost == pytest.approx(outcome.busy_seconds * 3.6 / 3_600)
    exported = folder / "all.jsonl"
    assert tokenmill("jobs", "export", "out", "out/cascade/1", "--merged", "--to", exported).code == 0
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, exported.read_text().splitlines())
        if line["response"] is not None
    }
    assert texts == {name: merged[name]["text"] for name in served_by}
    # In rounds, where there are many parts
    monkeypatch.setenv("TOKENMILL_PLAN__MAX_SHARD_ROWS", "3")
    assert tokenmill(*command, "--fresh").code == 0
    stores = [FolderStore(folder / path, read_only=True) for path in ("out", "out/cascade/1")]
    ledgers = [JobLedger(store) for store in stores]
    assert sum(len(list(ledger.parts())) for ledger in ledgers) > 6
    write_merged(ledgers, folder / "again.parquet", fan_in=2)
    again = pq.read_table(folder / "again.parquet")
    assert again.equals(pq.read_table(folder / "out" / "cascade" / "merged.parquet"))
    assert [row["text"] for row in again.to_pylist()] == [row["text"] for row in merged.values()]
    # Fresh ones replace all of the former
    renewed = CascadeOutcome.model_validate_json((folder / "out" / "cascade" / "cascade.json").read_bytes())
    assert not {step.job for step in renewed.steps} & {step.job for step in outcome.steps}
    # Other checks are another cascade
    accept.write_text("max_chars = 3\n")
    assert "settings.cascade.accept" in tokenmill(*command).error


@pytest.mark.slow
@pytest.mark.parametrize("names", [("tiny", "a0", "a1"), ("a0",)], ids=["beside", "merged"])
def test_rows_of_the_first_models_adapters_go_on_to_the_next_model_alone(
    tokenmill: Any, folder: Path, model_folder: Path, large: Path, adapters: ModuleType, chat: Any,
    write_lines: Callable[..., Path], names: tuple[str, ...],
) -> None:  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    given = [name for name in names if name != "tiny"]
    options = [part for name in given for part in ("--adapter", f"{name}={name}")]
    for seed, name in enumerate(given):
        adapters.make_adapter(base, folder / name, seed)
    if "tiny" not in names:
        options.append("--merge-adapter")
    lines = {name: [chat(f"{name}-{n}", f"number {n}", model=name) for n in range(8)] for name in names}
    path = write_lines(*chain(*lines.values()), chat("other", model="a9"))
    (folder / "accept.toml").write_text('pattern = "[aeo]"\n')
    command = ("run", path, "--model", f"tiny={model_folder}", *options, "--accept", "accept.toml", *ENGINE)

    done = tokenmill(*command, "--then", f"large={large}", "--output", "out")

    assert done.code == 0, done.err
    first, merged = read(folder / "out" / "results"), read(folder / "out" / "cascade" / "merged.parquet")
    alone = write_lines(*(chat(f"{n}", f"number {n}", model="large") for n in range(8)), name="alone.jsonl")
    assert tokenmill("run", alone, "--model", f"large={large}", "--output", "alone", *ENGINE).code == 0
    by_large = read(folder / "alone" / "results")
    for name in names:
        texts = [first[f"{name}-{n}"]["text"] for n in range(8)]
        wanted = [
            (name, name, text) if re.search("[aeo]", text) else (name, "large", by_large[f"{n}"]["text"])
            for n, text in enumerate(texts)
        ]
        rows = [merged[f"{name}-{n}"] for n in range(8)]
        assert [(row["model"], row["served_by"], row["text"]) for row in rows] == wanted
        assert {served_by for _, served_by, _ in wanted} == {name, "large"}
    assert len({tuple(first[f"{name}-{n}"]["text"] for n in range(8)) for name in names}) == len(names)
    assert f"({', '.join(names)})" in merged["other"]["error_message"]
    clash = tokenmill(*command, "--then", f"a0={large}", "--output", "other").error
    assert "must be one first model and others with other names" in clash


@pytest.mark.slow
def test_the_threshold_is_chosen_by_a_sample_of_the_larger_models_answers(
    tokenmill: Any, folder: Path, model_folder: Path, chat: Any, write_lines: Callable[..., Path]
) -> None:
    # Given the same model twice, so that all answers agree
    path = write_lines(*(chat(f"r{n}", f"number {n}", max_tokens=4) for n in range(60)))
    command = ("run", path, "--model", f"tiny={model_folder}", "--then", f"same={model_folder}")
    done = tokenmill(*command, "--agreement", 0.9, "--sample", 40, "--output", "out", *ENGINE, "--json")
    assert done.code == 0, done.err
    outcome = CascadeOutcome.model_validate(done.json())
    assert (outcome.sampled_rows, outcome.agreement) == (40, 1.0)
    assert outcome.min_mean_logprob is not None
    merged = read(folder / "out" / "cascade" / "merged.parquet")
    by_large = sum(row["served_by"] == "same" for row in merged.values())
    assert 40 <= by_large < 60, "the sample, and what lies below its lowest answer"
    assert sum(step.accepted for step in outcome.steps) == 60


@pytest.mark.slow
def test_rows_that_a_policy_routes_get_the_next_models_answer(
    tokenmill: Any, folder: Path, model_folder: Path, large: Path, chat: Any, write_lines: Callable[..., Path]
) -> None:
    # Given a policy that routes one prompt to the next model, and refuses another,
    (folder / "policy.toml").write_text(
        """[[rule]]
name = "medical"
action = "route"
model = "large"
keywords = ["dosage"]
[[rule]]
name = "secrets"
keywords = ["falcon"]
"""
    )
    path = write_lines(chat("plain", max_tokens=3), chat("routed", "the dosage"), chat("refused", "the falcon"))
    command = ("run", path, "--model", f"tiny={model_folder}", "--then", f"large={large}", "--output", "out")
    # when it runs without checks of answers,
    done = tokenmill(*command, "--content-policy", "rules:policy.toml", *ENGINE, "--json")
    # then the routed row has the next model's answer with the verdict, and the refused one none.
    assert done.code == 0, done.err
    merged = read(folder / "out" / "cascade" / "merged.parquet")
    assert {name: (row["status"], row["served_by"]) for name, row in merged.items()} == {
        "plain": ("succeeded", "tiny"), "routed": ("succeeded", "large"), "refused": ("failed", "large"),
    }  # fmt: skip
    (verdict,) = json.loads(merged["routed"]["content_policies"])["verdicts"]
    assert (verdict["rule"], verdict["action"], verdict["model"]) == ("medical", "route", "large")
    assert done.json()["steps"][0]["rejected"] == {"routed": 1, "unanswered": 1}


@pytest.mark.slow
def test_options_that_do_not_fit_are_refused(tokenmill: Any, folder: Path, model_folder: Path, chat: Any) -> None:
    (folder / "in.jsonl").write_text(json.dumps(chat("a")) + "\n")
    (folder / "accept.toml").write_text("max_chars = 3\n")
    command = ("run", "in.jsonl", "--model", f"tiny={model_folder}", "--output", "out")
    then = ("--then", f"large={model_folder}")
    assert "needs --then" in tokenmill(*command, "--accept", "accept.toml").err
    assert "--sample: needs --agreement" in tokenmill(*command, *then, "--sample", 40).error
    assert "other names" in tokenmill(*command, "--then", f"tiny={model_folder}", "--accept", "accept.toml").error
    assert "several" in tokenmill(*command, *then, "--accept", "accept.toml", "--deadline", "6h").error
    (folder / "accept.toml").write_text("agreement = 0.9\nmax_chars = 3\n")
    more = ("--then", f"x={model_folder}")
    assert "one next model" in tokenmill(*command, *then, *more, "--accept", "accept.toml").error
    assert not (folder / "out").exists()


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("accept", "text", "failed"),
    [
        ({"json_schema": SCHEMA}, '{"a": 1}', None),
        ({"json_schema": SCHEMA}, '{"a": "1"}', "json_schema"),
        ({"json_schema": SCHEMA}, "{", "json_schema"),
        ({"pattern": "^(yes|no)$"}, "no", None),
        ({"pattern": "^(yes|no)$"}, "not", "pattern"),
        ({"pattern": "(a+)+$"}, "a" * 100_000 + "b", "pattern"),
        ({"json_schema": {"pattern": "^(a+)+$"}}, json.dumps("a" * 10_000 + "b"), "json_schema"),
        ({"min_chars": 3}, "ab", "min_chars"),
        ({"max_chars": 1}, "ab", "max_chars"),
        ({"finish_reasons": ["stop"]}, "ab", "finish_reasons"),
    ],
)
def test_an_answer_is_checked(accept: dict[str, Any], text: str, failed: str | None) -> None:
    assert make_check(Acceptance.model_validate(accept))(text, "length") == failed


@pytest.mark.parametrize(
    ("accept", "why"),
    [
        ({"pattern": "("}, "pattern"),
        ({"json_schema": {"type": "number", "minimum": "x"}}, "json_schema"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/schema.json"}}, "not in the schema itself"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "not in the schema itself"),
    ],
)
def test_a_check_that_can_not_be_used_is_refused(accept: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_check(Acceptance.model_validate(accept))
