"""--quantize and --kv-dtype in `run`: reported, stored in job and manifest, and never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from engine import config
from engine.attention import backend_names
from engine.native.library import CHOICES
from schemas.models import ModelPin
from schemas.settings.settings import Attention, InstructionSet
from tokenmill.bench_results import FILE, MeasuredSpeed, find_result, store_result, this_machine
from tokenmill.config.cli_options import KvDType, Quantize
from tokenmill.config.engine_options import EngineOptions

pytestmark = pytest.mark.slow

Chat = Callable[..., dict[str, Any]]
Cli = Callable[..., Any]
Write = Callable[..., Path]
Results = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def run(model_folder: Path, chat: Chat, write_lines: Write) -> tuple[object, ...]:
    """The command of a job of three answers, in float32."""
    path = write_lines(*(chat(name, text=f"number {name}", max_tokens=9) for name in "abc"))
    return ("run", path, "--model", f"tiny={model_folder}", "--dtype", "float32", "--threads", "1")


def test_given_quantization_when_run_then_job_and_manifest_record_it(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], results: Results
) -> None:
    out = folder / "out"
    ended = tokenmill(*run, "-o", out, "--quantize", "int8-weight-only", "--kv-dtype", "int8")

    assert ended.code == 0, ended.err
    assert [row["status"] for row in results(out)] == ["succeeded"] * 3
    pin = json.loads((out / "job.json").read_text())["models"][0]
    assert (pin["quantization"], pin["kv_dtype"]) == ("int8-weight-only", "int8")
    engine = json.loads((out / "manifest.json").read_text())["engine"]
    assert (engine["quantization"], engine["kv_dtype"]) == ("int8-weight-only", "int8")
    assert engine["attention"].startswith("native (")
    assert 0 < engine["weight_bytes_int8"] < engine["weight_bytes_float32"]  # embedding and head stay as they are
    assert "tiny (float32, weights int8-weight-only, KV int8)" in tokenmill("jobs", "show", out).out


def test_given_a_job_when_its_command_comes_with_other_quantization_then_it_is_refused(
    tokenmill: Cli, folder: Path, run: tuple[object, ...]
) -> None:
    out = folder / "out"
    assert tokenmill(*run, "-o", out).code == 0

    weights = tokenmill(*run, "-o", out, "--quantize", "int8")
    cache = tokenmill(*run, "-o", out, "--kv-dtype", "int8")

    assert (weights.code, cache.code) == (1, 1)
    assert "model.quantization was none, now int8; choose another output or pass --fresh" in weights.error
    assert "model.kv_dtype was auto, now int8; choose another output or pass --fresh" in cache.error


def test_given_a_job_when_it_is_retried_then_it_keeps_its_quantization_unless_overridden(
    tokenmill: Cli, folder: Path, model_folder: Path, chat: Chat, write_lines: Write
) -> None:
    # Given a quantized job that was cancelled
    path = write_lines(chat("a"), chat("b"))
    quantized = ("--quantize", "int8-weight-only", "--kv-dtype", "int8", "--dtype", "float32")
    model = ("--model", f"tiny={model_folder}", "--threads", "1")
    assert tokenmill("run", path, *model, "-o", folder / "out", *quantized, "--limit", "1").code == 0
    (folder / "out/results/part-00001.parquet").unlink()
    (folder / "out/manifest.json").unlink()
    assert tokenmill("jobs", "cancel", folder / "out").code == 0
    # When it is retried, without options and with other ones
    same = tokenmill("jobs", "retry", folder / "out", "-o", folder / "same", "--threads", "1")
    other = tokenmill(
        "jobs", "retry", folder / "out", "-o", folder / "other", "--threads", "1", "--quantize", "none", "--kv-dtype",
        "auto",
    )  # fmt: skip
    assert (same.code, other.code) == (0, 0), same.err + other.err
    pins = [json.loads((folder / name / "job.json").read_text())["models"][0] for name in ("same", "other")]
    assert [(pin["quantization"], pin["kv_dtype"]) for pin in pins] == [("int8-weight-only", "int8"), ("none", "auto")]


@pytest.mark.parametrize("option", [("--quantize", "int3"), ("--kv-dtype", "fp4")])
@pytest.mark.parametrize("command", ["run", "estimate", "bench"])
def test_given_a_value_that_is_not_known_then_one_line_names_those_that_are(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], option: tuple[str, str], command: str
) -> None:
    given = {"run": (*run, "-o", folder / "out"), "estimate": ("estimate", *run[1:4]), "bench": ("bench",)}[command]
    ended = tokenmill(*given, *option)

    assert ended.code == 2
    assert option[0] in ended.error
    assert repr(option[1]) in ended.error
    assert "'int8'" in ended.error
    assert not (folder / "out").exists()


def test_given_no_native_kernels_when_an_int8_cache_is_requested_then_it_is_refused_with_the_reason(
    tokenmill: Cli, folder: Path, run: tuple[object, ...]
) -> None:
    ended = tokenmill(*run, "-o", folder / "out", "--dtype", "float16", "--kv-dtype", "int8")
    assert ended.code == 1
    assert "kv_dtype 'int8' is not available here: the native kernels compute in bfloat16 and float32" in ended.error


def test_given_an_instruction_set_in_the_settings_when_run_then_it_serves_and_is_no_part_of_the_order(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_INSTRUCTION_SET", "avx2")
    assert tokenmill(*run, "-o", folder / "out").code == 0
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["engine"]["attention"] == "native (avx2)"
    monkeypatch.delenv("TOKENMILL_INSTRUCTION_SET")
    assert "was done before" in tokenmill(*run, "-o", folder / "out").err
    monkeypatch.setenv("TOKENMILL_INSTRUCTION_SET", "mmx")
    wrong = tokenmill(*run, "-o", folder / "other")
    assert wrong.code == 1
    assert "setting instruction_set is wrong" in wrong.error


def test_given_a_bench_of_a_quantized_model_then_only_a_quantized_estimate_uses_it(
    tokenmill: Cli, folder: Path, run: tuple[object, ...], model_folder: Path
) -> None:
    how = ("--dtype", "float32", "--threads", "1")
    quantized = (*how, "--quantize", "int8-weight-only", "--kv-dtype", "int8")
    quick = ("--repeats", "1", "--batch", "1", "--rows", "4")

    found = tokenmill("bench", "--model", model_folder, *quick, *quantized, "--json").json()
    here = tokenmill("estimate", *run[1:4], *quantized, "--json").json()["times"]
    elsewhere = tokenmill("estimate", *run[1:4], *how, "--json").json()["times"]

    assert (found["quantization"], found["kv_dtype"]) == ("int8-weight-only", "int8")
    assert found["attention"].startswith("native (")
    assert [time["on"] for time in here] == ["this machine"]
    assert "float32, weights int8-weight-only, KV int8, batch 1" in here[0]["basis"]
    assert elsewhere == []


def test_given_a_measurement_of_before_there_was_quantization_then_it_counts_for_none(tmp_path: Path) -> None:
    plain = MeasuredSpeed("m", "float32", 1, this_machine(), "2026-01-01", 1.0, 2.0, 3)
    store_result(plain, tmp_path)
    entries = json.loads((tmp_path / FILE).read_text())
    for entry in entries:
        del entry["quantization"], entry["kv_dtype"]
    (tmp_path / FILE).write_text(json.dumps(entries))
    how = {"model": "m", "dtype": "float32", "threads": 1}
    assert find_result(tmp_path, **how, quantization="none", kv_dtype="auto") == plain
    assert find_result(tmp_path, **how, quantization="int8", kv_dtype="auto") is None


def test_the_choices_offered_are_those_of_the_engine() -> None:
    assert get_args(Quantize) == get_args(config.Quantize) == get_args(ModelPin.model_fields["quantization"].annotation)
    assert get_args(KvDType) == get_args(config.KVDType) == get_args(ModelPin.model_fields["kv_dtype"].annotation)
    assert get_args(InstructionSet) == CHOICES
    assert set(get_args(Attention)) == {"auto", *backend_names()}
    made = EngineOptions(
        quantize="int8", kv_dtype="int8", instruction_set="avx2", attention="flash2", kv_block_size=256
    )
    config_of = made.config()
    assert (config_of.quantize, config_of.kv_dtype, config_of.instruction_set) == ("int8", "int8", "avx2")
    assert (config_of.attention, config_of.cache.block_size) == ("flash2", 256)
