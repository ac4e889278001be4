"""--speculate in `run`: reported, stored in the manifest, not in the job, and without effect on answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig

from engine import config
from schemas.settings.settings import check_speculate
from tests.engine.speculative.proposers import eagle_heads as heads

pytestmark = pytest.mark.slow

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def run(model_folder: Path, chat: Chat, write_lines: Write) -> tuple[object, ...]:
    """The command of a job whose answers are alike."""
    lines = [
        chat(f"{name}{i}", text=f"{name} {name} {name} {name}", max_tokens=24, temperature=i / 2, seed=1)
        for name in "abc"
        for i in range(3)
    ]
    path = write_lines(*lines)
    return ("run", path, "--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1")


@pytest.mark.parametrize("method", ["ngram", "auto"])
def test_given_speculation_when_run_then_answers_are_the_same_and_the_manifest_counts_drafts(
    method: str, tokenmill: Cli, folder: Path, run: tuple[object, ...], results: Results
) -> None:
    assert tokenmill(*run, "-o", folder / "plain", "--speculate", "off").code == 0
    ended = tokenmill(*run, "-o", folder / "out", "--max-num-seqs", "2", "--speculate", method)

    assert ended.code == 0, ended.err
    answers = [
        [(row["custom_id"], row["text"], row["finish_reason"]) for row in results(folder / name)]
        for name in ("plain", "out")
    ]
    assert answers[0] == answers[1]
    manifest = json.loads((folder / "out/manifest.json").read_text())
    engine, usage = manifest["engine"], manifest["usage"]
    assert engine["speculate"] == method
    if method == "auto":
        assert usage["drafted"] == 0, "nine short answers end before a trial has paid"
        return
    assert usage["drafted"] > usage["accepted"] >= 0
    drafted = [value for name, value in engine.items() if name.startswith("drafted_")]
    assert sum(drafted) == usage["drafted"]
    shares = next(value for name, value in engine.items() if name.startswith("accepted_by_place_"))
    assert all(0 <= float(share) <= 1 for share in shares.split())
    assert f"of {usage['drafted']} draft tokens" in " ".join(ended.err.split())
    plain = json.loads((folder / "plain/manifest.json").read_text())
    assert (plain["usage"]["drafted"], plain["engine"]["speculate"]) == (0, "off")


def test_given_no_option_when_run_then_speculation_is_used_where_it_pays(
    tokenmill: Cli, folder: Path, run: tuple[object, ...]
) -> None:
    assert tokenmill(*run, "-o", folder / "out").code == 0
    assert json.loads((folder / "out/manifest.json").read_text())["engine"]["speculate"] == "auto"


def test_given_a_job_when_its_command_comes_with_other_speculation_then_it_is_the_same_job(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_SPECULATE", "ngram")
    assert tokenmill(*run, "-o", folder / "out").code == 0
    assert json.loads((folder / "out/manifest.json").read_text())["engine"]["speculate"] == "ngram"
    assert "was done before" in tokenmill(*run, "-o", folder / "out", "--speculate", "off").err
    monkeypatch.setenv("TOKENMILL_SPECULATE", "psychic")
    wrong = tokenmill(*run, "-o", folder / "other")
    assert wrong.code == 1
    assert "setting speculate is wrong" in wrong.error


def test_given_a_draft_model_when_run_then_answers_are_the_same_and_a_model_of_other_tokens_is_refused(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], results: Results, model_folder: Path
) -> None:
    assert tokenmill(*run, "-o", folder / "plain", "--speculate", "off").code == 0
    ended = tokenmill(*run, "-o", folder / "out", "--speculate", f"draft:{model_folder}")

    assert ended.code == 0, ended.err
    answers = [[(row["custom_id"], row["text"]) for row in results(folder / name)] for name in ("plain", "out")]
    assert answers[0] == answers[1]
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["engine"]["draft_model"] == str(model_folder)
    assert manifest["usage"]["accepted"] > 0.9 * manifest["usage"]["drafted"] > 0

    # Given a model whose tokenizer has two tokens the other way round,
    other = folder / "other"
    shutil.copytree(model_folder, other)
    text = json.loads((other / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    first, second = sorted(vocab, key=lambda token: vocab[token])[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(text))
    refused = tokenmill(*run, "-o", folder / "refused", "--speculate", f"draft:{other}")
    assert refused.code == 1
    assert f"the draft model {other} has another tokenizer: token {vocab[second]} is not the same text" in refused.error
    missing = tokenmill(*run, "-o", folder / "missing", "--speculate", "draft:nowhere")
    assert (missing.code, "nowhere" in missing.error) == (1, True)


def test_given_an_eagle_head_when_run_then_answers_are_the_same_and_one_of_another_model_is_refused(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], results: Results, model_folder: Path
) -> None:
    shape = heads.head_config(AutoConfig.from_pretrained(model_folder), draft_vocab=120, layers=[0, 1, 2])
    head = heads.save_head(folder / "head", shape, heads.random_weights(shape))
    assert tokenmill(*run, "-o", folder / "plain", "--speculate", "off").code == 0
    ended = tokenmill(*run, "-o", folder / "out", "--speculate", f"eagle3:{head}")

    assert ended.code == 0, ended.err
    answers = [[(row["custom_id"], row["text"]) for row in results(folder / name)] for name in ("plain", "out")]
    assert answers[0] == answers[1]
    manifest = json.loads((folder / "out/manifest.json").read_text())
    engine = manifest["engine"]
    assert (engine["speculate"], engine["draft_model"]) == ("eagle3", str(head))
    assert engine["drafted_eagle3"] == manifest["usage"]["drafted"] > 0
    assert len(engine["accepted_by_place_eagle3"].split()) == 4

    shape["vocab_size"] = 400
    other = heads.save_head(folder / "other", shape, heads.random_weights(shape))
    refused = tokenmill(*run, "-o", folder / "refused", "--speculate", f"eagle3:{other}")
    assert refused.code == 1
    assert "made for a model with a vocabulary of 400, but the model's is 300" in refused.error
    missing = tokenmill(*run, "-o", folder / "missing", "--speculate", "eagle3:nowhere")
    assert (missing.code, "nowhere" in missing.error) == (1, True)


def test_the_options_are_those_of_the_engine() -> None:
    offered = {check_speculate(name).partition(":")[0] for name in ("off", "ngram", "auto", "draft:x", "eagle3:x")}
    assert offered == set(get_args(config.Speculate))
    for wrong in ("draft", "draft:", "eagle3:", "eagle3", "off:x", "", "on"):
        with pytest.raises(
            ValueError, match="is no method of speculative decoding; give off, ngram, draft:MODEL, eagle3:HEAD or"
        ):
            check_speculate(wrong)
