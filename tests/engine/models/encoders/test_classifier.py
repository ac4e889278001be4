"""Classifiers: what their numbers mean, and that they are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.config import EngineConfig
from engine.embedding.engine import EncoderEngine
from engine.errors import CorruptWeights, RequestRefused, UnsupportedModel
from engine.models.encoders.classifier import activate, classifier_settings
from engine.models.load import describe_model, is_encoder
from engine.request import Request, SamplingParams, as_token_ids

PARAMS = SamplingParams(max_tokens=0, temperature=0)
IDENTITY = "torch.nn.modules.linear.Identity"
CROSS_ENCODER = "config_sentence_transformers.json"


def request(name: str, ids: list[int], types: list[int] | None = None) -> Request:
    given = None if types is None else as_token_ids(types)
    return Request(name, as_token_ids(ids), PARAMS, pooling="classify", token_type_ids=given)


def run(engine: EncoderEngine, *requests: Request) -> dict[str, Any]:
    for one in requests:
        engine.add(one)
    done: dict[str, Any] = {}
    while engine.has_work:
        done.update((each.request_id, each.pooled) for each in engine.step())
    return done


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert"])
def test_logits_are_those_of_transformers_in_any_batch(family: str, tiny_encoders: Any, tmp_path: Path) -> None:
    # Given texts of many lengths, some of them pairs where the model tells their texts apart
    folder = tiny_encoders.make_classifier(family, tmp_path, labels="abc")
    assert is_encoder(folder)
    assert describe_model(folder).spec.generates is False
    generator = np.random.default_rng(0)
    texts = [generator.integers(5, 400, size).tolist() for size in generator.integers(1, 60, 20)]
    types = [[int(at > len(text) // 2) for at in range(len(text))] for text in texts]
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    wants = []
    for text, kinds in zip(texts, types, strict=True):
        more = {"token_type_ids": torch.tensor([kinds])} if "bert" in family and family[0] in "brx" else {}
        with torch.inference_mode():
            wants.append(reference(torch.tensor([text]), **more).logits[0].numpy())
    # When they are computed in batches, then each gives the numbers that it gives alone
    engine = EncoderEngine.load(folder, EngineConfig(threads=1))
    done = run(engine, *(request(str(at), *given) for at, given in enumerate(zip(texts, types, strict=True))))
    for at, want in enumerate(wants):
        np.testing.assert_allclose(done[str(at)], want, atol=1e-5)


def test_token_types_change_the_logits_and_are_checked(tiny_encoders: Any, tmp_path: Path) -> None:
    engine = EncoderEngine.load(tiny_encoders.make_classifier("bert", tmp_path), EngineConfig(threads=1))
    done = run(engine, request("a", [5, 6]), request("b", [5, 6], [0, 1]), request("c", [5, 6], [0, 0]))
    assert abs(done["a"] - done["b"]) > 1e-3
    assert done["a"] == pytest.approx(done["c"], abs=1e-6)
    with pytest.raises(RequestRefused, match="token type 2 is given, but the model has 2"):
        engine.add(request("d", [5, 6], [0, 2]))
    with pytest.raises(RequestRefused, match="1 token types are given for 2 tokens"):
        engine.add(request("d", [5, 6], [0]))
    with pytest.raises(RequestRefused, match="an encoder generates nothing"):
        engine.add(Request("d", as_token_ids([5]), PARAMS, pooling="cls"))


def test_a_head_without_weights_is_refused(tiny_encoders: Any, tmp_path: Path) -> None:
    # Given a checkpoint of the encoder alone, whose config tells of a head
    folder = tiny_encoders.make_embedding_model("bert", tmp_path, pooling=None)
    config = json.loads((folder / "config.json").read_text())
    tiny_encoders.write(folder / "config.json", {**config, "architectures": ["BertForSequenceClassification"]})
    with pytest.raises(CorruptWeights, match=r"tensor classifier\.bias is among the missing ones"):
        EncoderEngine.load(folder)


def test_a_head_of_another_width_is_refused(tiny_encoders: Any, tmp_path: Path) -> None:
    folder = tiny_encoders.make_classifier("bert", tmp_path, labels="ab")
    config = json.loads((folder / "config.json").read_text())
    tiny_encoders.write(folder / "config.json", {**config, "id2label": {"0": "a"}, "label2id": {"a": 0}})
    with pytest.raises(CorruptWeights, match=r"tensor classifier\.\w+ is among the mismatched ones"):
        EncoderEngine.load(folder)


@pytest.mark.parametrize(
    ("labels", "config", "files", "score", "probability"),
    [
        ("a", {}, {}, "sigmoid", "sigmoid"),
        ("ab", {}, {}, "identity", "softmax"),
        ("ab", {"problem_type": "multi_label_classification"}, {}, "identity", "sigmoid"),
        ("a", {"problem_type": "regression"}, {}, "sigmoid", "identity"),
        ("a", {"sentence_transformers": {"activation_fn": IDENTITY}}, {}, "identity", "sigmoid"),
        ("a", {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, {}, "tanh", "sigmoid"),
        ("a", {}, {CROSS_ENCODER: {"activation_fn": IDENTITY}}, "identity", "sigmoid"),
        ("a", {}, {CROSS_ENCODER: {"prompts": {}}}, "sigmoid", "sigmoid"),
    ],
)  # fmt: skip
def test_the_files_say_which_functions_make_scores(
    labels: str, config: Any, files: Any, score: str, probability: str, tiny_encoders: Any, tmp_path: Path
) -> None:
    folder = tiny_encoders.make_classifier("bert", tmp_path, labels=labels, files=files, **config)
    settings = classifier_settings(folder)
    assert settings is not None
    assert (settings.labels, settings.score, settings.probability) == (tuple(labels), score, probability)


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        ({"sentence_transformers": {"activation_fn": "os.system"}}, {}, "'os.system' is none of"),
        ({}, {CROSS_ENCODER: {"activation_fn": 3}}, "'3' is none of"),
        ({}, {CROSS_ENCODER: {"default_prompt_name": "q"}}, "default_prompt_name 'q' is none of the prompts"),
        ({}, {"sentence_bert_config.json": {"max_seq_length": "x"}}, "max_seq_length is x"),
    ],
)
def test_what_the_files_ask_for_in_vain_is_refused(
    config: Any, files: Any, says: str, tiny_encoders: Any, tmp_path: Path
) -> None:
    folder = tiny_encoders.make_classifier("bert", tmp_path, files=files, **config)
    with pytest.raises(UnsupportedModel, match=says):
        classifier_settings(folder)


def test_a_folder_of_another_kind_is_no_classifier(embedding_model: Path, tiny_model: Any, tmp_path: Path) -> None:
    assert classifier_settings(embedding_model) is None
    assert classifier_settings(tiny_model("llama")) is None
    assert classifier_settings(tmp_path) is None


def test_functions_are_torchs_at_any_size() -> None:
    logits = np.array([[-1e4, 0, 1e4], [-3, 0.5, 2], [88, -88, 0]], dtype=np.float32)
    wants = {
        "identity": torch.from_numpy(logits).double(),
        "sigmoid": torch.from_numpy(logits).double().sigmoid(),
        "softmax": torch.from_numpy(logits).double().softmax(-1),
        "tanh": torch.from_numpy(logits).double().tanh(),
    }
    for name, want in wants.items():
        np.testing.assert_allclose(activate(logits, name), want.float().numpy(), rtol=1e-6)  # type: ignore[arg-type]
