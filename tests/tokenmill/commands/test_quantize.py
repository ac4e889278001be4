"""`tokenmill quantize` writes a checkpoint for `run`, reports the loss of quality, and leaves no incomplete files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Cli = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A few windows of text, as lines of requests."""
    file = tmp_path / "text.jsonl"
    words = "a message from the user to the assistant and back again, " * 120
    lines = [
        {"custom_id": str(i), "body": {"messages": [{"role": "user", "content": f"{i} {words}"}]}} for i in range(4)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that fit the tiny model's context."""
    monkeypatch.setattr("tokenmill.commands.quantize.WINDOW", 64)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_given_a_model_when_quantized_then_a_job_runs_on_it(
    tokenmill: Cli, folder: Path, model_folder: Path, text: Path, chat: Any, write_lines: Any, results: Any
) -> None:
    made = folder / "int8"
    ended = tokenmill(
        "quantize", model_folder, "--to", "int8", "--method", "smoothquant", "--calibration", text, "-o", made,
        "--windows", "8", "--threads", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for said in ("linear layers quantized", "perplexity before", "perplexity after", "same first choice"):
        assert said in ended.out
    assert "calibrating with 6 windows" in ended.err
    assert "scoring 2 windows" in ended.err
    assert {file.name for file in made.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(folder.glob(".int8-*"))
    path = write_lines(chat("a", text="hello", max_tokens=4))
    ran = tokenmill("run", path, "--model", f"tiny={made}", "-o", folder / "out", "--threads", "1")
    assert ran.code == 0, ran.err
    assert [row["status"] for row in results(folder / "out")] == ["succeeded"]


@pytest.mark.usefixtures("short")
@pytest.mark.slow
def test_given_gptq_then_products_are_calibrated_one_after_the_other(
    tokenmill: Cli, folder: Path, model_folder: Path, text: Path
) -> None:
    made = folder / "gptq"
    ended = tokenmill(
        "quantize", model_folder, "--to", "int8", "--method", "gptq", "--calibration", text, "-o", made, "--json",
        "--windows", "8", "--threads", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "12 of 12 products calibrated" in ended.err
    report = json.loads(ended.out)
    assert (report["method"], report["modules"]) == ("gptq", 21)
    nearest = tokenmill("quantize", model_folder, "--to", "int8", "-o", folder / "rtn", "--json")
    assert report["error"] > json.loads(nearest.out)["error"] > 0


@pytest.mark.usefixtures("short")
def test_given_json_then_the_report_is_the_one_in_the_folder(
    tokenmill: Cli, folder: Path, tiny_models: Any, model_folder: Path, text: Path
) -> None:
    made = folder / "fp8"
    ended = tokenmill("quantize", model_folder, "--to", "fp8", "--held-out", text, "-o", made, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report == json.loads((made / "quantization.json").read_text())
    assert (report["to"], report["method"], report["modules"]) == ("fp8", "rtn", 21)
    assert report["quality"]["tokens"] % 63 == 0
    assert report["quality"]["before"] != report["quality"]["after"]
    size = sum(tensor.nbytes for tensor in load_file(made / "model.safetensors").values())
    assert report["num_bytes"] == size < report["dense_bytes"]


def test_given_columns_that_fill_no_group_then_no_checkpoint_is_written(
    tokenmill: Cli, folder: Path, model_folder: Path
) -> None:
    ended = tokenmill("quantize", model_folder, "--to", "int4", "--group", "128", "-o", folder / "made")
    assert (
        "can't be quantized to int4: no linear layer has columns that fill whole groups of 128; take int8"
        in ended.error
    )
    assert not (folder / "made").exists()


def test_given_no_text_then_quality_is_reported_as_unmeasured(tokenmill: Cli, folder: Path, model_folder: Path) -> None:
    ended = tokenmill("quantize", model_folder, "--to", "int8", "-o", folder / "made")
    assert ended.code == 0, ended.err
    assert "its quality was not measured" in ended.err
    assert json.loads((folder / "made" / "quantization.json").read_text())["quality"] is None


@pytest.mark.slow
def test_given_options_that_contradict_then_the_error_is_one_line(
    tokenmill: Cli, folder: Path, model_folder: Path, text: Path
) -> None:
    full = folder / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for options, said in (
        (("--to", "int8", "--method", "smoothquant"), "needs --calibration FILE"),
        (("--to", "int4", "--method", "smoothquant", "--calibration", text), "is for --to int8"),
        (("--to", "int4", "--method", "gptq"), "needs --calibration FILE"),
        (("--to", "fp8", "--method", "gptq", "--calibration", text), "is for --to int4 and int8"),
        (("--to", "int8", "--group", "64"), "--group 64"),
        (("--to", "int4", "--group", "5"), "--group 5"),
        (("--to", "fp8", "--asymmetric"), "--asymmetric is for --to int4"),
        (("--to", "int8", "-o", full), f"{full} exists"),
        (("--to", "int8", "--held-out", folder / "none.txt"), "can't be read as text"),
    ):
        target = () if "-o" in options else ("-o", folder / "made")
        ended = tokenmill("quantize", model_folder, *options, *target)
        assert ended.code in (1, 2)
        assert said in ended.error
        assert not (folder / "made").exists()
    assert [file.name for file in full.iterdir()] == ["notes.txt"]


def test_given_a_model_that_breaks_on_the_way_then_nothing_is_left(
    tokenmill: Cli, folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("engine.quant.writing.save_file", break_off)
    ended = tokenmill("quantize", model_folder, "--to", "int8", "-o", folder / "made")
    assert ended.code == 1
    assert "made can't be written: no space left" in ended.error
    assert not (folder / "made").exists()
    assert not list(folder.glob(".made-*"))
