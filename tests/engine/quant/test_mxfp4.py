"""gpt-oss's MXFP4 experts: their numbers are transformers' to the bit, and what contradicts the config is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine import Engine
from engine.errors import CorruptWeights, UnsupportedModel
from engine.models.load import describe_model, load_model, open_model, stored_bytes
from engine.quant.formats.mxfp4 import mxfp4_weight
from tests.engine.oracle import Setting, check_equal, engine_answers, greedy_answer, make_prompts

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
BLOCKS, SCALES = "model.layers.1.mlp.experts.down_proj_blocks", "model.layers.1.mlp.experts.down_proj_scales"
Edit = Callable[[dict[str, Tensor]], Any]


def random_blocks(experts: int, rows: int, columns: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """All codes, and scales from 2^-7 to 2^-3."""
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(120, 125, blocks.shape[:3], generator=random, dtype=torch.uint8)


def make(tiny_models: Any, folder: Path, edit: Edit | None = None) -> tuple[Path, Path]:
    """A model whose experts are MXFP4 in one folder, and dense, by transformers' conversion, in the other."""
    dense = tiny_models.make_tiny_model("gpt-oss", folder / "dense", **SIZES)
    tensors = load_file(dense / "model.safetensors")
    packed = dict(tensors)
    for seed, name in enumerate(
        sorted(name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj")))
    ):
        experts, columns, rows = tensors[name].shape
        del packed[name]
        blocks, scales = packed[f"{name}_blocks"], packed[f"{name}_scales"] = random_blocks(
            experts, rows, columns, seed
        )
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    if edit is not None:
        edit(packed)
    made = folder / "packed"
    made.mkdir()
    save_file(packed, made / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (made / "config.json").write_text(json.dumps(config))
    return made, dense


def test_every_number_is_that_of_the_specification() -> None:
    # Given a block with all sixteen codes twice, and scales of all exponents
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes << 4).expand(255, 1, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    # When it is read, then each is sign * 2^exponent * mantissa times the scale, exactly
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((numbers, -numbers)).double().repeat_interleave(2)
    weight = mxfp4_weight(blocks, scales, "w_scales")
    assert (weight.form, weight.group, weight.n, weight.k) == ("int8", 32, 255, 32)
    assert isinstance(weight.scale, Tensor)
    exact = weight.codes.double() * weight.scale.double()
    assert torch.equal(exact, numbers * 2.0 ** (scales.double() - 127))


def test_matrices_are_those_of_transformers(tiny_models: Any, tmp_path: Path) -> None:
    packed, dense = (open_model(path).weights for path in make(tiny_models, tmp_path))
    assert {*packed.names} == {*dense.names}
    experts = [name for name in dense.names if ".experts." in name]
    assert len(experts) == 3 * 6 * 3 * 2
    for name in experts:
        ours, theirs = (torch.empty(source.shape(name)) for source in (packed, dense))
        packed.read(name, ours)
        dense.read(name, theirs)
        assert torch.equal(ours, theirs), name
        assert (packed.quantized(name) is None) == name.endswith(".bias")


def test_the_kernels_keep_them_small_and_answer_as_transformers_does(tiny_models: Any, tmp_path: Path) -> None:
    packed, dense = make(tiny_models, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    prompts = make_prompts(seed=3, count=6, vocab_size=257, shared=20, longest=50)
    wanted = [greedy_answer(reference, prompt, 5, (2,)) for prompt in prompts]
    for attention in ("native", "paged-sdpa"):
        engine = Engine.load(packed, Setting(7, 64, 4, True).config(max_model_len=256, attention=attention))
        got = engine_answers(engine, prompts, 5)
        check_equal(wanted, got)
        if attention == "native":
            assert engine.weight_bytes["int8"] > 0


def test_the_description_is_that_of_the_dense_model(tiny_models: Any, tmp_path: Path) -> None:
    packed, dense = make(tiny_models, tmp_path)
    assert describe_model(packed) == describe_model(dense)
    assert stored_bytes(packed) < stored_bytes(dense) / 2


REFUSED: dict[str, Edit] = {
    r"down_proj_scales is missing": lambda tensors: tensors.pop(SCALES),
    r"down_proj_scales has shape \[6, 64, 2\]": lambda t: t.update({SCALES: t[SCALES][:, :, :2].contiguous()}),
    r"down_proj_blocks has shape \[6, 64, 3, 8\]": lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].contiguous()}),
    r"down_proj_blocks has shape \[5, 64, 96\], but the config asks for 6 experts": lambda t: t.update(
        {BLOCKS: t[BLOCKS][:5].contiguous(), SCALES: t[SCALES][:5].contiguous()}
    ),
    r"experts.0.down_proj.weight has shape \[64, 64\], but the config asks for \[64, 96\]": lambda t: t.update(
        {BLOCKS: t[BLOCKS][:, :, :2].contiguous(), SCALES: t[SCALES][:, :, :2].contiguous()}
    ),
    r"down_proj_scales is int8, not uint8": lambda t: t.update({SCALES: t[SCALES].view(torch.int8)}),
    r"down_proj_scales holds a scale that is not a number": lambda t: t[SCALES][2, 5, 1].fill_(255),
    r"down_proj.weight is stored twice, one of them in the stack .*down_proj_blocks": lambda t: t.update(
        {BLOCKS.removesuffix("_blocks"): torch.zeros(6, 96, 64)}
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_contradicts_the_config_is_refused_by_name(named: str, tiny_models: Any, tmp_path: Path) -> None:
    packed, _ = make(tiny_models, tmp_path, REFUSED[named])
    with pytest.raises(CorruptWeights, match=named):
        load_model(packed, dtype=torch.float32, device=CPU)


def test_other_families_are_refused_by_name(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((tiny_model("mixtral") / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_model("mixtral") / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="quant_method is 'mxfp4'; what can be read is"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)
