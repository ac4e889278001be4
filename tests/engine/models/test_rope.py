"""Rotary tables give transformers' rotations, also where sequences outgrow the original context."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import UnsupportedModel
from engine.models.load import load_model
from engine.models.rope import RotaryTable, rope_spec

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "llama-linear", "llama-yarn", "gemma3"])
def test_rotations_equal_transformers_far_beyond_the_original_context(family, tiny_models):
    # Given a scaling made for 64 original positions
    config = tiny_models.make_config(family)
    reference = AutoModelForCausalLM.from_config(config).model.rotary_emb
    kinds = sorted(set(config.layer_types)) if family == "gemma3" else [None]
    x = torch.randn(600, 3, config.head_dim)
    positions = torch.arange(600)
    for kind in kinds:
        # When tokens far beyond them are rotated
        table = RotaryTable(rope_spec(config, config.head_dim, kind), torch.float32, CPU, positions=8)
        ours = table.lookup(positions, None).apply(x)
        # Then they turn as transformers turns them
        cos, sin = reference(x, positions[None], *([kind] if kind else []))
        half = config.head_dim // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
        theirs = x * cos[0][:, None] + rotated * sin[0][:, None]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [3.0, 4.0, 5.0],
    "original_max_position_embeddings": 20,
}


def test_longrope_has_the_long_frequencies_where_the_context_is_long(tiny_models, tmp_path, prompts, run, oracle):
    # Given a Phi 3 that was trained on 20 tokens, with heads of 12 dimensions of which 6 are rotated
    folder = tiny_models.make_tiny_model(
        "phi3", tmp_path, rope_parameters=LONG_ROPE, original_max_position_embeddings=20, partial_rotary_factor=0.5
    )
    long, short = ([ids for ids in prompts if (len(ids) > 20) is above] for above in (True, False))
    wanted = {len(ids): logits for ids, logits in zip(prompts, oracle(folder, prompts), strict=True)}
    # When sequences may be longer, then those that are have transformers' logits
    for positions in (None, 21):
        model = load_model(folder, dtype=torch.float32, device=CPU, max_positions=positions)
        assert model.spec.rope_original_max is None
        for ids in long:
            [ours] = run(model, [ids], [[(0, 0, 5)], [(0, 5, len(ids))]])
            torch.testing.assert_close(ours, wanted[len(ids)], atol=5e-5, rtol=1e-5)
    # and when they may not, then shorter ones have
    model = load_model(folder, dtype=torch.float32, device=CPU, max_positions=20)
    for ids in short:
        [ours] = run(model, [ids], [[(0, 0, 2)], [(0, 2, len(ids))]])
        torch.testing.assert_close(ours, wanted[len(ids)], atol=5e-5, rtol=1e-5)


def test_long_factors_of_another_number_are_refused(tiny_models):
    rope = {**LONG_ROPE, "short_factor": [1.0] * 6, "long_factor": [2.0] * 5}
    config = tiny_models.make_config("llama", rope_parameters=rope)
    with pytest.raises((UnsupportedModel, RuntimeError)):
        rope_spec(config, config.head_dim)


def test_the_table_grows_and_keeps_what_it_had(tiny_models):
    config = tiny_models.make_config("llama")
    spec = rope_spec(config, config.head_dim)
    grown = RotaryTable(spec, torch.float32, CPU, positions=4)
    for last in (3, 4, 5, 100):
        grown.lookup(torch.tensor([last]), None)
    whole = RotaryTable(spec, torch.float32, CPU, positions=200)
    positions = torch.arange(100)
    assert torch.equal(grown.lookup(positions, None).cos, whole.lookup(positions, None).cos)
    assert torch.equal(grown.lookup(positions, None).sin, whole.lookup(positions, None).sin)


@pytest.mark.parametrize("prompt_length", [9, 16, 17, 30])
@pytest.mark.slow
def test_dynamic_scaling_answers_as_generate_does(prompt_length, tiny_model, run):
    # Given a model with 16 original positions, and transformers' own greedy continuation to 40 tokens
    folder = tiny_model("llama-dynamic")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.randint(3, 257, (prompt_length,), generator=torch.Generator().manual_seed(prompt_length))
    theirs = reference.generate(
        prompt[None],
        max_new_tokens=40 - prompt_length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    sequence = theirs.sequences[0]
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert model.spec.rope_original_max == 16
    assert model.spec.max_position == 64
    # When the prompt is computed whole or in chunks, and the answer token by token or at once (after preemption)
    for prompt_chunk, answer_chunk in ((prompt_length, 1), (4, 1), (5, 7)):
        cuts = [*range(0, prompt_length, prompt_chunk), *range(prompt_length, 40, answer_chunk), 40]
        steps = [[(0, a, b)] for a, b in pairwise(cuts)]
        [logits] = run(model, [sequence], steps, prompt_lengths=[prompt_length])
        # Then every logit is the one that generate saw
        torch.testing.assert_close(logits[prompt_length - 1 : -1], torch.cat(theirs.logits), atol=5e-5, rtol=1e-5)


def test_dynamic_scaling_without_lengths_is_a_mistake_of_ours(tiny_model):
    model = load_model(tiny_model("llama-dynamic"), dtype=torch.float32, device=CPU)
    ids = torch.tensor([5])
    with pytest.raises(ValueError, match="rope length"):
        model.forward(ids, torch.tensor([0]), lambda layer, q, k, v, scale: q, None)
