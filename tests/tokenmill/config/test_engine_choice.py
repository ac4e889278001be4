"""Which engine computes a model, and what a user is told where none does."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids
from engine.errors import UnsupportedModel
from engine.models.load import describe_shape
from engine.vllm.settings import InvalidOption, engine_arguments, parse_options, pinned_options, rows_without_lane
from schemas.models import ModelPin
from schemas.settings.settings import load_settings
from tokenmill.cli import main
from tokenmill.config import engine_choice
from tokenmill.config.engine_choice import choose_engine, choose_engines
from tokenmill.config.engine_options import EngineOptions, engine_options
from tokenmill.config.job_options import ChosenModel
from tokenmill.errors import ModelError, UserError
from tokenmill.models.sources import ModelSource

pytestmark = pytest.mark.skipif(find_spec("vllm") is not None, reason="these are about environments without vLLM")


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A model that not even transformers knows."""
    folder = tmp_path / "unknown"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "nextyear", "architectures": ["NextYearForCausalLM"]})
    )
    return folder


@pytest.fixture
def vllm_python(tmp_path: Path) -> Path:
    """An interpreter in whose environment vLLM says that it knows two architectures."""
    script = tmp_path / "bin" / "python"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho NextYearForCausalLM GPTNeoXForCausalLM\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def chosen(path: Path) -> ChosenModel:
    return ChosenModel("m", ModelSource("m", path, None, 0))


def test_auto_takes_our_own_code_then_vllm_then_transformers(tiny_model: Any, unknown: Path, vllm_python: Path) -> None:
    assert choose_engine(tiny_model("llama"), "auto", None).engine == "tokenmill"
    assert choose_engine(tiny_model("llama"), "auto", vllm_python).engine == "tokenmill"
    assert choose_engine(tiny_model("gpt2"), "auto", None).engine == "transformers"
    assert choose_engine(tiny_model("gpt2"), "auto", vllm_python).engine == "transformers", "that vLLM doesn't know it"
    choice = choose_engine(unknown, "auto", vllm_python)
    assert (choice.engine, choice.why) == ("vllm", "vLLM knows NextYearForCausalLM")


def test_a_wanted_engine_is_taken_or_refused(tiny_model: Any, unknown: Path, vllm_python: Path) -> None:
    assert choose_engine(tiny_model("llama"), "vllm", vllm_python).engine == "vllm"
    assert choose_engine(tiny_model("llama"), "transformers", vllm_python).engine == "transformers"
    with pytest.raises(ModelError, match=r"--engine vllm: vLLM is not installed here; install it .*make install-vllm"):
        choose_engine(tiny_model("llama"), "vllm", None)
    with pytest.raises(ModelError, match=r"--engine tokenmill: .*give auto"):
        choose_engine(tiny_model("gpt2"), "tokenmill", None)
    with pytest.raises(ModelError, match=r"--engine transformers: .*nextyear"):
        choose_engine(unknown, "transformers", vllm_python)


def test_where_no_engine_is_there_it_is_said_what_to_install(unknown: Path) -> None:
    with pytest.raises(ModelError, match=r"nextyear.*; vLLM may: install it .*TOKENMILL_VLLM__PYTHON"):
        choose_engine(unknown, "auto", None)
    with pytest.raises(ModelError, match="vLLM can't be imported by "):
        choose_engine(unknown, "auto", Path(sys.executable))


def test_a_config_that_the_own_code_refuses_goes_to_the_next_engine(
    tiny_models: Any, vllm_python: Path, tmp_path: Path
) -> None:
    # Given a Llama whose config asks for what no family function reads, and which transformers' code ignores
    folder = tiny_models.make_tiny_model("llama", tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clip_qkv": 8.0}))
    # Then transformers' code computes it, which a check at load compares with transformers alone
    assert choose_engine(folder, "auto", None).engine == "transformers"
    with pytest.raises(ModelError, match=r"--engine tokenmill: clip_qkv=8.0 is not supported for llama models; .*auto"):
        choose_engine(folder, "tokenmill", None)


@pytest.mark.slow
def test_the_models_command_shows_what_each_engine_says(
    tiny_model: Any,
    unknown: Path,
    vllm_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(folder: Path) -> dict[str, Any]:
        assert main(["models", "show", str(folder), "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    monkeypatch.delenv("TOKENMILL_VLLM__PYTHON", raising=False)
    facts = shown(tiny_model("olmo2"))
    assert (facts["engine"], facts["architecture"]) == ("tokenmill", "Olmo2ForCausalLM")
    assert facts["computed_by"] == {"tokenmill": "yes", "vllm": "not installed here", "transformers": "yes"}
    facts = shown(unknown)
    assert facts["engine"] is None
    assert "nextyear" in facts["computed_by"]["transformers"]
    assert "vLLM may: install it" in facts["why"]
    monkeypatch.setenv("TOKENMILL_VLLM__PYTHON", str(vllm_python))
    facts = shown(tiny_model("gpt2"))
    assert facts["computed_by"] == {
        "tokenmill": "GPT2LMHeadModel is not among the architectures of tokenmill's own code",
        "vllm": "it doesn't know GPT2LMHeadModel",
        "transformers": "yes",
    }


def test_a_command_goes_on_in_the_environment_of_vllm(
    tiny_model: Any, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = vllm_python.parent.parent / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr(engine_choice.os, "execve", lambda *given: ran.append(given))
    monkeypatch.setattr(sys, "argv", ["tokenmill", "run", "requests.jsonl", "--engine", "vllm"])
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    options = EngineOptions(device="cpu", engine="vllm", vllm_python=vllm_python)
    assert choose_engines([chosen(tiny_model("llama"))], options)[0].engine == "vllm"
    ((interpreter, command, environment),) = ran
    assert interpreter == vllm_python
    assert command == [str(vllm_python), "-P", "-m", "tokenmill", "run", "requests.jsonl", "--engine", "vllm"]
    assert str(library) in environment["LD_PRELOAD"].split(":")
    assert "mine.so" in environment["LD_PRELOAD"].split(":")


def test_an_environment_without_vllm_is_not_entered_again_and_again(
    tiny_model: Any, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter(interpreter: Path, command: list[str], environment: dict[str, str]) -> None:
        monkeypatch.setenv(engine_choice.ENTERED, environment[engine_choice.ENTERED])
        choose_engines([chosen(tiny_model("llama"))], options)  # as it does there

    monkeypatch.setattr(engine_choice.os, "execve", enter)
    options = EngineOptions(device="cpu", engine="vllm", vllm_python=vllm_python)
    with pytest.raises(ModelError, match="can't import vLLM; install it"):
        choose_engines([chosen(tiny_model("llama"))], options)


def test_a_model_that_only_vllm_knows_has_an_estimate(
    model_folder: Path, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    known, folder = describe_shape(model_folder)[0], tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "nextyear", "architectures": ["NextYearForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    shape, encoder = describe_shape(folder)
    assert not encoder
    assert shape.num_parameters == known.num_parameters
    of_config = {"architecture": known.architecture, "num_active_parameters": known.num_active_parameters}
    assert replace(shape, eos_token_ids=known.eos_token_ids, **of_config) == known
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setenv("TOKENMILL_VLLM__PYTHON", str(vllm_python))
    estimate = ["estimate", str(tmp_path / "in.jsonl"), "--model", f"tiny={folder}", "--json"]
    assert main([*estimate, "--engine-option", "quantization=fp8", "--hardware", "h100"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["rows"], made["max_tokens"]) == (1, 4)
    assert made["times"][0]["on"] == "h100"


def test_options_of_vllm_are_for_vllm(tiny_model: Any) -> None:
    with pytest.raises(ModelError, match="--engine-option is for vLLM"):
        choose_engines([chosen(tiny_model("llama"))], EngineOptions(vllm={"block_size": 32}, vllm_given=True))
    assert (
        choose_engines([chosen(tiny_model("llama"))], EngineOptions(vllm={"block_size": 32}))[0].engine == "tokenmill"
    )


def test_the_longest_sequence_is_a_setting(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a Phi 3 with two sets of rotary factors, the long ones for contexts beyond 20 tokens
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [9.0] * 6}
    folder = tiny_models.make_tiny_model(
        "phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=20, sliding_window=None
    )
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)

    def scores() -> list[float]:
        engine = Engine.load(folder, engine_options(load_settings(), device="cpu", dtype="float32").config())
        (done,) = engine.run([Request("a", as_token_ids(range(5, 20)), params)])
        assert done.prompt_logprobs is not None
        return [float(score) for score in done.prompt_logprobs.chosen[1:]]

    # When sequences may be no longer, then the short ones are used
    whole = scores()
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "20")
    assert max(abs(one - other) for one, other in zip(scores(), whole, strict=True)) > 0.01
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "21")
    assert scores() == whole
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "513")
    with pytest.raises(UnsupportedModel, match="max_model_len 513 is beyond the model's context of 512"):
        scores()


def test_options_come_from_the_command_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_ENGINE", "vllm")
    monkeypatch.setenv("TOKENMILL_VLLM__TENSOR_PARALLEL_SIZE", "2")
    monkeypatch.setenv("TOKENMILL_VLLM__ENFORCE_EAGER", "true")
    monkeypatch.setenv("TOKENMILL_VLLM__QUANTIZATION", "fp8")
    monkeypatch.setenv("TOKENMILL_VLLM__PYTHON", "/opt/vllm/bin/python")
    given = ['speculative-config={"method": "ngram"}', "quantization=awq"]
    settings = load_settings()
    made = engine_options(settings, device="cpu", engine_option=given)
    assert made.engine == "vllm"
    assert made.vllm_python == Path("/opt/vllm/bin/python")
    speculative = {"method": "ngram"}
    assert made.vllm == {
        "tensor_parallel_size": 2, "enforce_eager": True, "quantization": "awq", "speculative_config": speculative
    }  # fmt: skip
    pinned = pinned_options(made.vllm)
    assert pinned == ('quantization="awq"',), "the others change no answer"
    assert parse_options(dict(one.split("=", 1) for one in pinned)) == {"quantization": "awq"}


def test_experts_are_distributed_by_either_engine() -> None:
    made = engine_options(load_settings(), device="cpu", tensor_parallel=2, expert_parallel=True).config()
    assert (made.tensor_parallel, made.expert_parallel) == (2, True)
    assert engine_arguments("model", made, {}, pools=False, on_cpu=True)["enable_expert_parallel"] is True
    assert "enable_expert_parallel" not in engine_arguments("model", EngineConfig(), {}, pools=False, on_cpu=True)


def test_layers_are_divided_into_stages_by_either_engine() -> None:
    options = engine_options(load_settings(), device="cpu", tensor_parallel=2, pipeline_parallel=3, micro_batches=4)
    assert options.num_ranks == options.config().num_ranks == 6
    assert options.config().micro_batches == 4
    assert engine_arguments("model", options.config(), {}, pools=False, on_cpu=True)["pipeline_parallel_size"] == 3


def test_host_memory_for_blocks_is_set_by_an_option() -> None:
    assert engine_options(load_settings(), device="cpu").config().cache.host_bytes is None
    assert engine_options(load_settings(), device="cpu", kv_offloading_size=5000).config().cache.host_bytes == 5000


@pytest.mark.parametrize("pools", [False, True])
def test_vllm_chooses_the_size_of_a_step_on_a_gpu_where_none_is_given(pools: bool) -> None:
    """On a CPU it is that of the other engine; rows for interactive requests are added."""

    def sizes(config: EngineConfig, *, on_cpu: bool) -> tuple[int | None, int | None]:
        arguments = engine_arguments("model", config, {}, pools=pools, on_cpu=on_cpu)
        return arguments["max_num_seqs"], arguments["max_num_batched_tokens"]

    given = engine_options(load_settings(), device="cpu", max_num_seqs=40, max_num_batched_tokens=512).config()
    assert sizes(EngineConfig(), on_cpu=True) == (192, None if pools else 2048)
    assert sizes(EngineConfig(), on_cpu=False) == (None, None)
    for on_cpu in (True, False):
        assert sizes(given, on_cpu=on_cpu) == (80, None if pools else 512)
    assert [rows_without_lane(rows + min(rows, 64)) for rows in (1, 40, 64, 65, 960)] == [1, 40, 64, 65, 960]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("tensor_parallel_size", "give NAME=VALUE"),
        ("=2", "give NAME=VALUE"),
        ("trust_remote_code=true", "a model's code is never executed"),
        ("load-format=pt", "safetensors only"),
        ("model=other", "give --model"),
    ],
)
def test_options_that_can_not_be_set_are_refused_by_name(given: str, says: str) -> None:
    with pytest.raises((UserError, InvalidOption), match=says):
        engine_options(load_settings(), device="cpu", engine_option=[given])


def test_the_engine_and_its_version_are_part_of_the_pin() -> None:
    ours = ModelPin(name="m", source="m", digest="sha256:1", dtype="float32")
    theirs = ours.model_copy(update={"engine": "vllm", "engine_version": "0.32.0"})
    newer = theirs.model_copy(update={"engine_version": "0.33.0"})
    other = theirs.model_copy(update={"engine_options": ('quantization="fp8"',)})
    assert len({pin.key for pin in (ours, theirs, newer, other)}) == 4
    assert (
        ModelPin.model_validate_json('{"name": "m", "source": "m", "digest": "sha256:1", "dtype": "float32"}') == ours
    )
