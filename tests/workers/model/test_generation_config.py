"""The sampling parameters that a model's authors set, as its files hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from schemas.requests.sampling_defaults import SamplingDefaults
from workers.errors import WorkerError
from workers.model.generation_config import sampling_defaults
from workers.model.loaded_model import LoadedModel


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_the_parameters_that_requests_have_are_read_and_others_left_out(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) is None
    qwen = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "min_p": None}
    expected = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling_defaults(write(tmp_path, qwen)) == expected
    old = {"repetition_penalty": 1.05, "max_new_tokens": 2048, "transformers_version": "4.37.0"}
    assert sampling_defaults(write(tmp_path, old)) == SamplingDefaults(repetition_penalty=1.05, max_new_tokens=2048)
    assert sampling_defaults(write(tmp_path, {"do_sample": False, "eos_token_id": 2})) is None


def test_a_gguf_file_has_them_as_keys(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.1)
    writer.add_float32("general.sampling.xtc_threshold", 0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sampling_defaults(file) == SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"temperature": 3.5}, "generation_config.json: temperature is 3.5: input should be less than or equal to 2"),
        ({"top_p": "high"}, "top_p is high: input should be a valid number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0.*give --generation-config ignore"),
        ("[1]", "holds no JSON object"),
        ("{", "can't be read"),
        ("[" * 100_000, "can't be read"),
    ],
)
def test_values_that_no_request_could_have_are_refused(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(WorkerError, match=says):
        sampling_defaults(write(tmp_path, content))


def test_a_loaded_models_pin_has_them_unless_they_are_ignored(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write(folder, {"temperature": 0.25})
    pin = LoadedModel.load(folder, name="tiny").pin()
    assert pin.sampling_defaults == SamplingDefaults(temperature=0.25)
    ignored = LoadedModel.load(folder, name="tiny", use_generation_config=False).pin()
    assert ignored.sampling_defaults is None
    assert ignored.key == pin.key
